#!/usr/bin/env bash
# Build the image in a clean root and run its programs. Needs root, Debian, and the packages debootstrap and podman.
#
# It proves: each step of the Dockerfile works on a machine that has only Debian and Python. In the root of the image, as its
# user and as process 1 of a PID namespace, a Redis, a merger and an island make a run, become ready, and leave on SIGTERM
# within their grace period; without a URL, an island says what is missing. It does not prove: the base image of Docker's
# registry, CUDA, or a container engine: podman builds the image, and chroot runs it.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${1:-$(mktemp -d)}
run=(podman --root "$work/store" --runroot "$work/run")
workers=()
# Send a signal to a background process of `here`, which is the child of its `unshare`.
signal() { pkill "-$1" -P "$(pgrep -P "$2")"; }
finish() {
	for each in "${workers[@]}"; do signal KILL "$each" 2> /dev/null || true; done
	wait
	"${run[@]}" rm --force --all --time 0 > /dev/null
}
trap finish EXIT

if [ ! -e "$work/root/usr/bin/python3" ]; then
	debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/root" > "$work/debootstrap.log"
fi
"${run[@]}" image exists localhost/debian-python || tar -C "$work/root" -c . | "${run[@]}" import - localhost/debian-python
# The machine's own settings of pip and its certificates, where it has them.
mounts=()
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do [ -e "$file" ] && mounts+=(--volume "$file:$file:ro"); done
"${run[@]}" build --isolation chroot --network host "${mounts[@]}" --build-arg BASE=localhost/debian-python \
	--build-arg EXTRAS=dash --file ops/deploy/Dockerfile --tag archipelago .
"${run[@]}" images
container=$("${run[@]}" create --cgroups disabled archipelago)
root=$("${run[@]}" mount "$container")
mapfile -t environment < <("${run[@]}" image inspect --format '{{range .Config.Env}}{{println .}}{{end}}' archipelago | grep .)
user=$("${run[@]}" image inspect --format '{{.Config.User}}' archipelago)
# Run a command in the root of the image with its environment, its user and its folder.
here() {
	unshare --fork --pid --mount sh -c 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && user=$1 && shift &&
		exec chroot --userspec="$user" "$0" env -i --chdir=/work "$@"' "$root" "$user" "${environment[@]}" "$@"
}
[ "$(here id -u)" = 10001 ]
here archipelago --version
if here archipelago island 2> "$work/missing"; then exit 1; fi
cat "$work/missing"
grep -q ARCHIPELAGO_URL "$work/missing"

port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
redis=$(port)
# Its Redis is the one that the Python package brings.
cp ops/deploy/kubernetes/redis/redis.sh "$root/redis.sh"
here REDIS_PASSWORD=check REDIS_PORT="$redis" REDIS_FOLDER=/work sh -c \
	'mkdir /tmp/bin && ln -s "$(find /opt -name valkey-server -type f)" /tmp/bin && PATH=/tmp/bin:$PATH exec sh /redis.sh' \
	> "$work/redis.log" & workers+=($!)
common=("ARCHIPELAGO_URL=redis://:check@127.0.0.1:$redis" ARCHIPELAGO_RUN=image JAX_PLATFORMS=cpu archipelago)
until here "${common[@]}" init --run image --model.size tiny --data.sequence-length 64 --inner.steps 100000 2> "$work/init.log"; do
	[ $? = 75 ] || { cat "$work/init.log" >&2; exit 1; } # 75: the Redis does not answer yet
	sleep 1
done
page() { python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode().strip())' "$1" 2> /dev/null; }
for worker in merger island; do
	at=$(port)
	here "${common[@]}" "$worker" --stopped-status 75 --probe-port "$at" 2> "$work/$worker.log" & workers+=($!)
	for ((i = 0; i < 600; i++)); do page "http://127.0.0.1:$at/readyz" && break || sleep 1; done
	[ "$i" -lt 600 ] || { cat "$work/$worker.log" >&2; exit 1; }
done
for number in 2 1; do
	began=$SECONDS status=0
	signal TERM "${workers[$number]}"
	wait "${workers[$number]}" || status=$?
	echo "status $status, $((SECONDS - began)) s after SIGTERM"
	if [ "$status" != 75 ] || [ $((SECONDS - began)) -ge 60 ]; then exit 1; fi
done
echo "the image works"
