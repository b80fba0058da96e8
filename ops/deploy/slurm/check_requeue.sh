#!/usr/bin/env bash
# Run worker.sbatch on a real Slurm on this machine. Needs root, the Debian packages slurm-wlm and munge, and `archipelago`
# on the PATH. It takes about two minutes. ops/deploy/slurm/check_requeue.sh [FOLDER]
#
# It proves: a merger and an array of two islands start as jobs and train; an island that is killed is queued again under
# its name and goes on; an island that gets SIGTERM before the end of its job's time leaves cleanly and is queued again;
# when the run ends, all jobs end with status 0. It does not prove: several nodes, GPUs, preemption by other jobs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-$(mktemp -d)}
mkdir -p "$work"/{state,spool,bin,redis,submit}
cd "$work"
servers=()
finish() {
	status=$?
	[ $status = 0 ] || tail -n 20 "$work"/*.log "$work"/submit/*.log >&2 || true
	[ -e "$work/slurm.conf" ] && scancel --quiet --full --user root 2> /dev/null || true
	for pid in "${servers[@]}"; do kill "$pid" 2> /dev/null || true; done
	wait
	exit $status
}
trap finish EXIT
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
until_true() { # until_true SECONDS WORDS COMMAND…
	local end=$((SECONDS + $1)) words=$2
	shift 2
	until "$@"; do
		[ $SECONDS -lt $end ] || { echo "error: waited in vain for $words" >&2; return 1; }
		sleep 0.5
	done
	echo "$SECONDS s: $words"
}

# A Slurm of one node that has eight processors on paper.
chmod 755 "$work"
dd if=/dev/urandom of=munge.key bs=1k count=1 status=none && chmod 400 munge.key
munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munge.pid" \
	--log-file="$work/munge.log" --seed-file="$work/munge.seed" > munged.out 2>&1 & servers+=($!)
cat > slurm.conf << CONF
ClusterName=check
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$(port)
SlurmdPort=$(port)
SlurmUser=root
AuthType=auth/munge
# A job that is queued again waits for its old credential to expire: two minutes by default.
AuthInfo=socket=$work/munge.socket,cred_expire=5
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=1
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=check Nodes=ALL Default=YES State=UP
CONF
export SLURM_CONF=$work/slurm.conf
slurmctld -D > slurmctld.out 2>&1 & servers+=($!)
slurmd -D > slurmd.out 2>&1 & servers+=($!)
node_is_idle() { sinfo --noheader --format %T 2> /dev/null | grep -q idle; }
until_true 900 "a node of Slurm" node_is_idle

# A Redis, and a run of about a minute.
python=$(head -n 1 "$(command -v archipelago)" | cut -c 3-) # the one that has our packages
ln -sf "$("$python" -c 'from archipelago.ops.launch.embedded_redis import find_program as f; print(f().path)')" bin/valkey-server
redis_port=$(port)
PATH=$work/bin:$PATH REDIS_PASSWORD=check REDIS_FOLDER=$work/redis REDIS_PORT=$redis_port \
	sh "$here/../kubernetes/redis/redis.sh" > redis.log & servers+=($!)
export ARCHIPELAGO_URL=redis://:check@127.0.0.1:$redis_port ARCHIPELAGO_RUN=slurm JAX_PLATFORMS=cpu
cd submit
is_created() { archipelago init --run slurm --model.size tiny --inner.steps 1200 --data.sequence-length 64 > ../init.log 2>&1; }
until_true 900 "a run" is_created
merger=$(sbatch --parsable --array=0 "$here/worker.sbatch" merger)
islands=$(ARCHIPELAGO_STEP_SECONDS=0.06 sbatch --parsable --array=0-1 "$here/worker.sbatch" island)
shown() { archipelago status --json 2> /dev/null | python3 -c "import json, sys; found = json.load(sys.stdin); sys.exit(not ($1))"; }
until_true 900 "both islands train" shown 'found["participating"] == 2'

restarts() { scontrol show job "$1" | grep -q "Restarts=$2"; }
process() { # of one element of the array
	scontrol listpids "$(squeue --noheader --array --jobs "$islands" --format '%A %K' | awk -v k="$1" '$2 == k {print $1}')" |
		awk '$3 == 0 && $5 == 0 {print $1}'
}
trains_again() { grep -c "joined slurm" "archipelago-$islands-$1.log" | grep -qx 2; }
kill -KILL "$(process 1)"
until_true 900 "Slurm has queued the killed island again" restarts "${islands}_1" 1
restarts "${islands}_0" 0
until_true 900 "the killed island trains again under its name" trains_again 1
scancel --signal=TERM "${islands}_0" # what --signal=TERM@60 does before the end of the job's time
until_true 900 "Slurm has queued the stopped island again" restarts "${islands}_0" 1
grep -q "left after" "archipelago-$islands-0.log"
until_true 900 "the stopped island trains again" trains_again 0

ended() { [ -z "$(squeue --noheader)" ]; }
until_true 900 "the end of all jobs" ended
for each in "${merger}_0" "${islands}_0" "${islands}_1"; do
	echo "$each: $(scontrol show job "$each" | grep -oE "(JobState|Restarts|ExitCode)=\S+" | tr '\n' ' ')"
	scontrol show job "$each" | grep -q "JobState=COMPLETED"
done
restarts "${islands}_0" 1 && restarts "${islands}_1" 1
shown 'found["step"] >= found["steps"]'
echo "all jobs have ended with status 0, and the run has made all its steps"
