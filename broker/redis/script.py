"""The two scripts by which mergers write to Redis: one takes the lease, one makes a fenced write.

The server runs each script as one step. `FENCED` checks that this merger still holds the lease, that nothing of what
it knows was lost, and that what it points to is there; then it runs the commands. So a write is one round trip, and
there is one place where fencing is decided. All keys of a script lie in one hash slot. Its text, of 8 kB, travels with
each call, so that a server that has forgotten it, as after a restart, is no special case.

A command that fails because its key holds another type of value, or a stream at its last id, meets damage: no merger
wrote that. The key is deleted, the command runs again, and the answer names the key, so that the merger loads the run
again. A full server refuses commands that take memory from the first one on, so the first command of a write is one of
these, if any is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Value = str | bytes | int
#: A command of Redis (in capitals) or of the script `FENCED`, the key that it changes, and its other words.
Command = tuple[Value, ...]

#: Lua that both scripts share.
_COMMON = """
local function instance()
  local server, replication = redis.pcall('INFO', 'server'), redis.pcall('INFO', 'replication')
  if type(server) ~= 'string' or type(replication) ~= 'string' then return '' end
  local run_id = string.match(server, 'run_id:(%w+)') or ''
  local history = string.match(replication, 'master_replid:(%w+)') or ''
  return run_id .. ' ' .. history
end
local function text(answer) return type(answer) == 'string' and answer or '' end
"""

#: KEYS: manifest, epoch, lease, tape. ARGV: the merger, one that has ended or nothing, the last epoch of this merger,
#: the length of the lease in milliseconds, the longest lease. Answers `gone`, or `held`, the uid and the holder, or
#: `taken`, the uid, the epoch and the instance of the server.
ACQUIRE = (
    _COMMON
    + """
local uid = redis.pcall('HGET', KEYS[1], 'uid')
if type(uid) ~= 'string' then return {'gone'} end
local holder, left = text(redis.pcall('GET', KEYS[3])), redis.call('PTTL', KEYS[3])
local is_other = holder ~= '' and holder ~= ARGV[1] and holder ~= ARGV[2]
if is_other and left >= 0 and left <= tonumber(ARGV[5]) then return {'held', uid, holder} end
local function epoch_in(found)
  local epoch = tonumber(string.match(text(found), '^%d+') or '0')
  return epoch <= 2^53 and epoch or 0
end
local newest, taped = redis.pcall('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1), 0
if type(newest) == 'table' and newest[1] then
  local fields = newest[1][2]
  for i = 1, #fields, 2 do if fields[i] == 'epoch' then taped = epoch_in(fields[i + 1]) end end
end
local epoch = math.max(epoch_in(ARGV[3]), epoch_in(redis.pcall('GET', KEYS[2])), taped) + 1
local number = string.format('%.0f', epoch)
redis.call('SET', KEYS[2], number .. ' ' .. ARGV[1])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[4])
return {'taken', uid, number, instance()}
"""
)

#: KEYS: manifest, epoch, the header of the last round, then all others that the commands name. ARGV: the uid, the value
#: of the epoch's key, the last round or nothing, the instance or nothing; how many fields of hashes must have a value,
#: and of each its key, its name and the value; how many keys must exist, and these; how many entries must exist, and of
#: each its key, its id, where it will be kept (where nothing may lie), what its chunks' keys begin with, how many it
#: may have, and their SHA-1 digests or nothing; then each command as the number of its words, and these. Answers `done`
#: with the keys that were damaged, `gone`, `overtaken`, `round` with what was found, `instance`, or `changed`,
#: `missing` or `withdrawn` with the key.
FENCED = (
    _COMMON
    + """
local at = 0
local function word() at = at + 1; return ARGV[at] end
local uid, mark, round, server = word(), word(), word(), word()
if redis.pcall('GET', KEYS[2]) ~= mark then return {'overtaken'} end
if redis.pcall('HGET', KEYS[1], 'uid') ~= uid then return {'gone'} end
if round ~= '' then
  local found = text(redis.pcall('HGET', KEYS[3], 'round'))
  if found ~= round then return {'round', found} end
end
if server ~= '' and instance() ~= server then return {'instance'} end
for i = 1, tonumber(word()) do
  local key, name, value = word(), word(), word()
  if text(redis.pcall('HGET', key, name)) ~= value then return {'changed', key} end
end
for i = 1, tonumber(word()) do
  local key = word()
  if redis.call('EXISTS', key) == 0 then return {'missing', key} end
end
local function fields_of(key, id)
  local found = redis.pcall('XRANGE', key, id, id)
  return not found.err and found[1] and found[1][2]
end
-- The keys of the chunks that a pointer names. A forged pointer, to more chunks than `most`, names none.
local function chunks(prefix, most, count, name)
  local out = {}
  count = tonumber(count or '')
  if not count or count > most or not name or not string.match(name, '^[%w%._%-]+$') then return out end
  for i = 0, count - 1 do out[i + 1] = prefix .. name .. ':' .. string.format('%.0f', i) end
  return out
end
local function pointer_in(fields)
  local count, name
  for i = 1, #fields, 2 do
    if fields[i] == 'chunks' then count = fields[i + 1] end
    if fields[i] == 'chunks_name' then name = fields[i + 1] end
  end
  return count, name
end
local named = {}  -- chunks of the entries before: no two may have the same, because each moves once
for i = 1, tonumber(word()) do
  local key, id, kept, prefix, most, digests = word(), word(), word(), word(), tonumber(word()), word()
  local fields = fields_of(key, id)
  if not fields or redis.call('EXISTS', kept) == 1 then return {'withdrawn', key} end
  for i, chunk in ipairs(chunks(prefix, most, pointer_in(fields))) do
    if named[chunk] or redis.call('EXISTS', chunk) == 0 then return {'withdrawn', key} end
    named[chunk] = true
    if digests ~= '' and redis.sha1hex then  -- its island may have changed it since; fakeredis has no digests
      local data = redis.pcall('GET', chunk)
      local digest = type(data) == 'string' and redis.sha1hex(data)
      if digest ~= string.sub(digests, 40 * i - 39, 40 * i) then return {'withdrawn', key} end
    end
  end
end

local damaged = {'done'}
local function once(words)
  local answer = redis.pcall(unpack(words))
  local failed = type(answer) == 'table' and answer.err
  if failed and (string.find(tostring(failed), 'WRONGTYPE') or string.find(tostring(failed), 'exhausted')) then
    redis.call('DEL', words[2])
    table.insert(damaged, words[2])
    answer = redis.pcall(unpack(words))
    failed = type(answer) == 'table' and answer.err
  end
  return failed and answer
end
-- Lua unpacks a few thousand values at most, so a command for many of them runs several times.
local for_many = {HSET = true, HDEL = true, SADD = true, SREM = true}
local function run(words)
  if not for_many[words[1]] then return once(words) end
  for i = 3, #words, 1000 do
    local failed = once({words[1], words[2], unpack(words, i, math.min(i + 999, #words))})
    if failed then return failed end
  end
end
local function each(command, keys, ...) for _, key in ipairs(keys) do redis.call(command, key, ...) end end
local function pointed(key, prefix, most, of)
  local found = redis.pcall('HMGET', key, of .. 'chunks', of .. 'chunks_name')
  if found.err then return {}, {} end
  return chunks(prefix, most, found[1], found[2]), found
end

local commands = {}
-- lease KEY HOLDER MILLISECONDS: extends the lease. A full server does so, too, while the lease lasts.
function commands.lease(words)
  if redis.call('PEXPIRE', words[2], words[4]) == 0 then
    return run({'SET', words[2], words[3], 'PX', words[4]})
  end
end
-- keep STREAM ID KEY FROM MOST TO: moves an entry into a hash, and its chunks to keys that its island cannot write.
-- These have the entry's id for a name, because an island may use the name of its chunks for another entry, too.
function commands.keep(words)
  local fields, id = fields_of(words[2], words[3]), words[3]
  for i = 1, #fields, 1000 do  -- Lua unpacks a few thousand values at most, and an island may add any number of fields
    redis.call('HSET', words[4], unpack(fields, i, math.min(i + 999, #fields)))
  end
  local from = chunks(words[5], tonumber(words[6]), pointer_in(fields))
  for i, kept in ipairs(chunks(words[7], #from, #from, id)) do
    redis.call('RENAME', from[i], kept)
    redis.call('PERSIST', kept)
  end
  if #from > 0 then redis.call('HSET', words[4], 'chunks_name', id) end
  return run({'XDEL', words[2], words[3]})
end
-- remove STREAM ID PREFIX MOST: deletes an entry and its chunks.
function commands.remove(words)
  each('UNLINK', chunks(words[4], tonumber(words[5]), pointer_in(fields_of(words[2], words[3]) or {})))
  return run({'XDEL', words[2], words[3]})
end
-- forget KEY PREFIX MOST: deletes a hash and its chunks.
function commands.forget(words)
  each('UNLINK', (pointed(words[2], words[3], tonumber(words[4]), '')))
  redis.call('UNLINK', words[2])
end
-- replace KEY PREFIX MOST SECONDS FIELD VALUE ...: writes a hash anew. The chunks of the one before expire after that
-- time, because readers may be downloading them, and those of the one before that are deleted.
function commands.replace(words)
  local key, prefix, most = words[2], words[3], tonumber(words[4])
  local old, where = pointed(key, prefix, most, '')
  each('UNLINK', (pointed(key, prefix, most, 'previous_')))
  each('EXPIRE', old, words[5])
  redis.call('DEL', key)
  local failed = run({'HSET', key, unpack(words, 6)})
  if not failed and #old > 0 then
    redis.call('HSET', key, 'previous_chunks', where[1], 'previous_chunks_name', where[2])
  end
  return failed
end
-- gone BEAT STREAM NOTES EVALUATIONS NAMES TO NAME LEAST MOST COUNT KEPT: deletes the keys of an island without
-- entries whose heartbeat has fewer milliseconds left than LEAST, or more than MOST. Its evaluations move first, COUNT
-- at a time. An entry that is too large, or of another island, is none of them. STREAM and NAMES are deleted if they
-- hold another type of value: islands cannot write to them.
function commands.gone(words)
  local _, beat, stream, notes, evaluations, names, to, name, least, most, count, kept = unpack(words)
  once({'XLEN', stream})
  once({'SCARD', names})
  local left = redis.call('PTTL', beat)
  if redis.call('XLEN', stream) > 0 or (left >= tonumber(least) and left <= tonumber(most)) then return end
  local found = redis.pcall('XRANGE', evaluations, '-', '+', 'COUNT', count)
  for _, entry in ipairs(found.err and {} or found) do
    local fields, bytes, by = entry[2], 0, nil
    for i, each in ipairs(fields) do
      bytes = bytes + #each
      if i % 2 == 1 and each == 'by' then by = fields[i + 1] end
    end
    if #fields <= 32 and bytes <= 2048 and by == name then
      local failed = run({'XADD', to, 'MAXLEN', '~', kept, '*', unpack(fields)})
      if failed then return failed end
    end
    redis.call('XDEL', evaluations, entry[1])
  end
  redis.call('UNLINK', beat, stream, notes)
  if found.err or #found < tonumber(count) then
    redis.call('UNLINK', evaluations)
    redis.call('SREM', names, name)
  end
end

while at < #ARGV do
  local words = {}
  for i = 1, tonumber(word()) do words[i] = word() end
  local failed = (commands[words[1]] or run)(words)
  if failed then return failed end
end
return damaged
"""
)


class Write:
    """The commands of one fenced write, and what must be there for it."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        #: Fields of hashes that must have a value: of each its key, its name and the value.
        self.expected: list[tuple[str, str, str]] = []
        #: Keys that must exist.
        self.needed: list[str] = []
        #: Of each entry that must be there its stream, its id, the key to which it moves, what its chunks' keys begin
        #: with, how many chunks it may have, and their digests.
        self.entries: list[tuple[str, str, str, str, int, str]] = []
        self._more_keys: list[str] = []  # those that a command names after its first one

    def keep(
        self, stream: str, id_: str, kept: str, chunks: str, most: int, kept_chunks: str, digests: str = ""
    ) -> None:
        """Move an entry of a stream into a hash, which must not exist. Else its island uses the id a second time.

        Args:
            chunks: What the keys of its chunks begin with.
            most: The most chunks that it may have.
            kept_chunks: What the keys to which the chunks move begin with.
            digests: The SHA-1 digests that its chunks must have, joined; empty for any chunks.
        """
        self.entries.append((stream, id_, kept, chunks, most, digests))
        self.commands.append(("keep", stream, id_, kept, chunks, most, kept_chunks))

    def gone(self, keys: Sequence[str], *words: Value) -> None:
        """Add the script's command `gone`, which begins with six keys."""
        self.commands.append(("gone", *keys, *words))
        self._more_keys += keys[1:]

    def request(self) -> tuple[list[str], list[Value]]:
        """Return all keys that the write names, once each, and the script's arguments from the expected fields on."""
        named = [str(command[1]) for command in self.commands] + [kept for _, _, kept, *_ in self.entries]
        keys = dict.fromkeys([*named, *self.needed, *self._more_keys, *(key for key, *_ in self.expected)])
        out: list[Value] = [len(self.expected), *(word for each in self.expected for word in each)]
        out += [len(self.needed), *self.needed, len(self.entries)]
        out += [word for entry in self.entries for word in entry]
        for command in self.commands:
            out += [len(command), *command]
        return list(keys), out


def texts(answer: Sequence[Any]) -> list[str]:
    return [each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in answer]
