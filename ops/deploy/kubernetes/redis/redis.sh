#!/bin/sh
# Start a Redis or Valkey for runs of Archipelago, in a container: with a password, an append-only file, and users that
# survive restarts (`archipelago invite` makes them). It deletes nothing when its memory is full.
#
#   REDIS_PASSWORD    the password of the user `default`, who may do everything
#   REDIS_MAXMEMORY   the limit of its memory, such as 8gb
set -eu
case "${REDIS_PASSWORD:-}" in
"" | *[!A-Za-z0-9_-]*)
	echo "error: REDIS_PASSWORD must be a password of letters, digits, - and _. Put one into the secret of the Redis." >&2
	exit 2
	;;
esac
umask 077
cd "${REDIS_FOLDER:-/data}"
touch users.acl
{ grep -v '^user default ' users.acl || true; echo "user default on >$REDIS_PASSWORD ~* &* +@all"; } > users.new
mv users.new users.acl
server=$(command -v valkey-server || command -v redis-server)
exec "$server" --port "${REDIS_PORT:-6379}" --dir "$PWD" --aclfile "$PWD/users.acl" --appendonly yes \
	--timeout 60 --maxclients 50000 --proto-max-bulk-len 16mb \
	--maxmemory "${REDIS_MAXMEMORY:-2gb}" --maxmemory-policy noeviction
