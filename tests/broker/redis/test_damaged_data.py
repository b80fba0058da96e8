"""Data that other clients forged, damaged or deleted: streams, and records that cannot be read."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.commits import NUMBER_MAX, START, parse_entry
from archipelago.broker.errors import BrokerError, FencedError, WithdrawnError
from archipelago.broker.messages import Call, Evaluation, Note, Resume, to_fields
from archipelago.broker.redis import updates
from archipelago.broker.redis.chunks import CHUNK_BYTES
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.reader import SAID_BYTES_MAX
from archipelago.broker.redis.script import Write
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.redis.updates import FLOOD_ENTRIES, ISLANDS_MAX, REMEMBER_SECONDS, SILENT_KEPT
from tests import samples
from tests.broker.redis.stored_keys import Connect
from tests.conftest import PATIENCE_SECONDS, Until
from tests.failing import failing
from tests.samples import LARGE, REFUSAL, with_payloads

# -- forged entries ------------------------------------------------------------------------------------------------

FIELDS = {**to_fields(samples.contribution(LARGE)), "chunks": "3", "chunks_name": "somebody"}
FORGERIES: dict[str, dict[Any, Any]] = {
    "no known field": {"hello": "world"},
    "not text": {b"\xff": b"\xfe", **FIELDS, "island": b"\xff\xfe"},
    "an infinite loss": {**FIELDS, "loss": "inf"},
    "no payload": {k: v for k, v in FIELDS.items() if not k.startswith("chunks")},
    "no name": {k: v for k, v in FIELDS.items() if k != "chunks_name"},
    "no number of chunks": {**FIELDS, "chunks": "many"},
    "chunks that do not exist": FIELDS,
    "no chunks": {**FIELDS, "chunks": "0"},
    "a negative number of chunks": {**FIELDS, "chunks": "-3"},
    "a billion chunks": {**FIELDS, "chunks": str(10**9)},
    "a million chunks": {**FIELDS, "chunks": str(1 << 20)},
    "a petabyte": {**FIELDS, "chunks": "1000000", "bytes": str(10**6 * CHUNK_BYTES)},
    "a name that is not text": {**FIELDS, "chunks_name": b"\xff"},
}


def test_a_forged_entry_is_delivered_with_its_fault_and_can_be_refused(
    transport: RedisTransport, raw: Any, epoch: int
) -> None:
    samples.refuse(transport, epoch, [])  # sends the server the script, whatever ran before
    for sequence, (name, fields) in enumerate(FORGERIES.items()):
        raw.xadd(Keys(transport.run).updates("a"), fields)
        transport.island.publish(samples.contribution(sequence=sequence), b"payload")
        forged, honest = with_payloads(transport.merger.updates(0.0))
        assert forged.fault, name
        assert forged.payload == b"", name
        assert (honest.fault, honest.payload) == ("", b"payload"), name
        before = raw.info("stats")["total_net_input_bytes"]
        samples.refuse(transport, epoch, [(forged.entry, REFUSAL)])
        sent = raw.info("stats")["total_net_input_bytes"] - before
        assert sent < 10_000, f"{name}: the client sent the names of all chunks"
        transport.merger.commit(epoch, samples.commit([honest.entry]))
        transport.merger.rewind()
        assert (transport.reader.backlog(), transport.merger.updates(0.0)) == (0, []), name


def test_an_island_changes_no_merged_contribution_and_loses_one_whose_chunks_it_deletes(
    transport: RedisTransport, raw: Any, epoch: int
) -> None:
    """Its role may delete what it has uploaded. A merger that starts needs what was merged."""
    merged, withdrawn = (transport.island.publish(samples.contribution(LARGE, sequence=n), LARGE) for n in range(2))
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([merged]))
    raw.delete(*raw.keys(f"*{transport.run}*:c:a:*"))
    assert transport.merger.read([merged])[0].payload == LARGE
    with pytest.raises(WithdrawnError):
        transport.merger.commit(epoch, samples.commit([withdrawn], round_number=3))
    assert [entry.round for entry in transport.reader.tape(9)] == [1]
    transport.merger.trim(epoch, [merged])
    assert not raw.keys(f"*{transport.run}*:m:a:*")


def test_a_contribution_with_very_many_fields_is_merged_whole(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """The server's Lua unpacks a few thousand values at most. A commit must not stop halfway."""
    extra = {f"x{n}": "1" for n in range(9000)}
    raw.sadd(Keys(transport.run).islands, "a")
    raw.xadd(Keys(transport.run).updates("a"), {**to_fields(samples.contribution()), "payload": b"payload", **extra})
    (found,) = transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([found.entry]))
    assert transport.merger.read([found.entry]) == [found]
    assert (transport.reader.backlog(), len(transport.reader.tape(9))) == (0, 1)


def test_a_merged_contribution_is_not_hidden_by_another_entry_of_its_name(
    transport: RedisTransport, raw: Any, epoch: int
) -> None:
    """The stream of an island that fell silent is deleted. Then the island may use its ids again."""
    entry = transport.island.publish(samples.contribution(), b"payload")
    (found,) = transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([entry]))
    raw.delete(Keys(transport.run).updates("a"))
    raw.xadd(Keys(transport.run).updates("a"), {"x": "1"}, id=parse_entry(entry)[1])
    assert transport.merger.read([entry]) == [found]
    raw.delete(Keys(transport.run).updates("a"))
    again = {**to_fields(samples.contribution(sequence=1)), "payload": b"payload"}
    raw.xadd(Keys(transport.run).updates("a"), again, id=parse_entry(entry)[1])
    with failing(WithdrawnError, "broker.withdrawn"):
        transport.merger.commit(epoch, samples.commit([entry], round_number=3))
    assert transport.merger.read([entry]) == [found]


# -- lost streams --------------------------------------------------------------------------------------------------


def test_a_waiting_reader_survives_the_loss_of_its_stream(
    transport: RedisTransport, connections: Connect, raw: Any, until: Until
) -> None:
    found: list[Any] = []

    def read() -> None:
        try:
            found.extend(delivery.contribution for delivery in transport.merger.updates(PATIENCE_SECONDS))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            found.append(error)

    stream = Keys(transport.run).updates("a")
    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    raw.xdel(stream, parse_entry(entry)[1])  # an empty stream, on which the reader can wait
    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: raw.info("clients")["blocked_clients"] == 1, "the reader to wait")
    raw.delete(stream)
    connections().island.publish(samples.contribution(), b"payload")
    reader.join()
    assert found == [samples.contribution()]


def test_streams_of_another_type_and_at_their_last_id_stop_no_others(transport: RedisTransport, raw: Any) -> None:
    keys = Keys(transport.run)
    for name in ("a", "b", "c"):
        transport.island.heartbeat(samples.heartbeat(name))
    raw.set(keys.updates("a"), "no stream")
    raw.xadd(keys.updates("b"), {"x": "1"}, id=f"{NUMBER_MAX}-{NUMBER_MAX}")
    assert [delivery.sender for _ in range(3) for delivery in transport.merger.updates(0.0)] == ["b"]
    transport.island.publish(samples.contribution(island="c"), b"payload")
    assert [delivery.sender for _ in range(3) for delivery in transport.merger.updates(0.0)] == ["c"]


def test_an_island_that_empties_its_stream_and_ends_it_stops_nobody(
    transport: RedisTransport, raw: Any, epoch: int
) -> None:
    stream = Keys(transport.run).updates("mallory")
    transport.island.heartbeat(samples.heartbeat("mallory"))
    raw.xadd(stream, {"x": "1"})
    (junk,) = transport.merger.updates(0.0)
    raw.xtrim(stream, maxlen=0, approximate=False)
    raw.xadd(stream, {"x": "1"}, id=f"{NUMBER_MAX}-{NUMBER_MAX}")
    samples.refuse(transport, epoch, [(junk.entry, REFUSAL)])
    (end,) = transport.merger.updates(0.0)
    mine = transport.island.publish(samples.contribution(), b"payload")
    assert [each.entry for each in transport.merger.updates(0.0)] == [mine]
    samples.refuse(transport, epoch, [(end.entry, REFUSAL)])
    transport.merger.commit(epoch, samples.commit([mine]))
    assert (transport.reader.counters().pending, transport.reader.backlog()) == (0, 0)


def test_nothing_points_to_an_upload_whose_chunks_are_gone(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """A failover may have forgotten them after they were uploaded."""
    transport.merger.commit(epoch, samples.commit([], b"", difference=b"one"))
    full = samples.commit([], LARGE).compaction
    assert full is not None
    placed = transport.merger.place(epoch, full)
    raw.delete(*raw.keys(f"*{transport.run}*:m:f0.1.*"))
    with failing(BrokerError, code="broker.other-round"):
        transport.merger.compact(epoch, placed, after_round=1)
    assert transport.reader.fragment(0)[0].version == 0


@pytest.mark.parametrize("kind", ["counters", "tape", "snapshots", "data"])
def test_a_key_of_another_type_is_replaced_by_what_a_commit_writes(
    transport: RedisTransport, raw: Any, epoch: int, kind: str
) -> None:
    """Redis undoes no script of which one command fails, so the rest of the commit must be there, too."""
    raw.delete(getattr(Keys(transport.run), kind))
    raw.rpush(getattr(Keys(transport.run), kind), "x")
    with failing(BrokerError, code="broker.damaged"):  # the merger loads the run again
        transport.merger.commit(epoch, samples.commit([], cursors={"0": (0, 5)}, counts={"merged": 3}))
    reader = transport.reader
    assert (len(reader.tape(9)), reader.cursors(), reader.counters().merged) == (1, {"0": (0, 5)}, 3)
    assert len(reader.events(START, 0.0)) == 1


@pytest.mark.parametrize("kind", ["islands", "updates", "island"])
def test_a_key_of_another_type_to_which_islands_write_is_deleted_by_the_merger(
    transport: RedisTransport, raw: Any, epoch: int, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Else the island would send each contribution again, or no heartbeat, until a merger starts."""
    keys, merger = Keys(transport.run), transport.merger
    key = {"islands": keys.islands, "updates": keys.updates("a"), "island": keys.island("a")}[kind]
    monkeypatch.setattr(updates, "FORGET_SECONDS", 0.0)
    transport.island.heartbeat(samples.heartbeat("a"))
    assert transport.updates.names() == ["a"]
    raw.set(key, "x")
    # An island may write to its heartbeat, so that makes no merger load the run again.
    with nullcontext() if kind == "island" else failing(BrokerError, "broker.damaged"):
        merger.forget(epoch, transport.reader.presences())
    assert not raw.exists(key)
    transport.island.heartbeat(samples.heartbeat("a"))
    transport.island.publish(samples.contribution(), b"payload")


def test_a_merger_that_reads_no_names_loads_the_run_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    raw.set(Keys(transport.run).islands, "x")
    with failing(BrokerError, "broker.damaged"):
        transport.merger.look(0.0, around=True)
    transport.merger.take_up(epoch, Resume(0, epoch), {}, {})
    transport.island.publish(samples.contribution(), b"payload")
    transport.merger.look(0.0, around=True)
    assert transport.updates.names() == ["a"]


# -- records that cannot be read ----------------------------------------------------------------------------------


def test_unreadable_events_are_skipped(transport: RedisTransport, raw: Any, epoch: int) -> None:
    stream = Keys(transport.run).snapshots
    transport.merger.announce(epoch, Call(1, 0))
    with raw.pipeline(transaction=False) as pipe:
        for n in range(300):  # One call does not read so many entries.
            pipe.xadd(stream, {"kind": "tidings" if n % 2 else "snapshot", "round": "x"})
        pipe.execute()
    ((first, event),) = transport.reader.events(START, 0.0)
    assert event == Call(1, 0)
    assert transport.reader.events(first, 0.0) == []
    assert transport.reader.events(first, 0.02) == []
    transport.merger.announce(epoch, Call(2, 1))
    assert [event for _, event in transport.reader.events(first, 5.0)] == [Call(2, 1)]


def test_what_an_island_says_harms_nobody_else(transport: RedisTransport, raw: Any) -> None:
    """An island may append anything to its own notes and evaluations, at any id."""
    keys, reader, last = Keys(transport.run), transport.reader, f"{2**64 - 1}-{2**64 - 1}"
    says: list[Any] = [Note(3.0, "mallory", "joined", ""), Evaluation(1, 4, 100, 3.0, 5.0, "mallory")]
    forged = Note(3.0, "merger", "refused", "no"), Evaluation(1, 4, 100, 3.0, 5.0, "a")
    for key, said, lie in zip(keys.said("mallory"), says, forged, strict=True):
        for message in (said, lie, replace(said, unix_seconds=1e12)):
            raw.xadd(key, to_fields(message))
        raw.xadd(key, {b"\xff": b"\xfe"}, id=last)
    raw.sadd(keys.islands, "mallory")
    notes = [Note(2.0, "merger", "served", ""), Note(4.0, "a", "joined", "")]
    evaluations = [Evaluation(1, 4, 100, 2.0, 5.0), Evaluation(1, 4, 100, 4.0, 5.0, "a")]
    for note, evaluation in zip(notes, evaluations, strict=True):
        reader.note(note)
        reader.record_evaluation(evaluation)
    assert reader.notes(9) == [notes[0], says[0], notes[1]]
    assert reader.evaluations() == [evaluations[0], says[1], evaluations[1]]
    for key in keys.said("mallory"):
        raw.delete(key)
        raw.xadd(key, {"x": "x" * (SAID_BYTES_MAX + 1)})
    reader.notes(9), reader.evaluations()  # they may be read once, because sizes are asked for along with them
    before = raw.info("stats")["total_net_output_bytes"]
    assert (reader.notes(9), reader.evaluations()) == (notes, evaluations)
    assert raw.info("stats")["total_net_output_bytes"] - before < 100_000, "large streams were read"


def test_a_flooded_stream_is_counted_and_not_read(transport: RedisTransport, raw: Any) -> None:
    transport.island.publish(samples.contribution(), b"payload")
    transport.island.heartbeat(samples.heartbeat("mallory", state="left"))
    with raw.pipeline(transaction=False) as pipe:
        for _ in range(FLOOD_ENTRIES + 1):
            pipe.xadd(Keys(transport.run).updates("mallory"), {"x": "1"})
        pipe.execute()
    before = raw.info("stats")["total_net_output_bytes"]
    counters = transport.reader.counters()
    assert (counters.published, counters.published_tokens) == (FLOOD_ENTRIES + 2, 100)
    assert raw.info("stats")["total_net_output_bytes"] - before < 10 * FLOOD_ENTRIES, "the entries were read"
    assert transport.reader.backlog() == FLOOD_ENTRIES + 2


def test_a_heartbeat_that_is_far_too_large_is_not_read(transport: RedisTransport, raw: Any) -> None:
    """An island may write anything into its heartbeat, which all others read."""
    for name in ("a", "mallory"):
        transport.island.heartbeat(samples.heartbeat(name))
    assert len(transport.reader.presences()) == 2
    raw.hset(Keys(transport.run).island("mallory"), "loss", "9" * (1 << 20))
    found = []
    for _ in range(3):  # it may be read once, because its size is asked for along with it
        before = raw.info("stats")["total_net_output_bytes"]
        names = [presence.heartbeat.island for presence in transport.reader.presences()]
        transport.reader.counters()
        found.append((names, raw.info("stats")["total_net_output_bytes"] - before < 1 << 20))
    assert found[1:] == [(["a"], True)] * 2
    transport.island.heartbeat(samples.heartbeat("mallory"))
    transport.reader.presences()
    assert len(transport.reader.presences()) == 2, "one of the right size is read again"


def test_a_long_set_of_names_is_read_in_parts(transport: RedisTransport, raw: Any) -> None:
    transport.island.heartbeat(samples.heartbeat("a"))
    raw.sadd(Keys(transport.run).islands, *(f"m{number}" for number in range(20_000)))
    calls, found = 0, list[str]()
    while not found:
        before = raw.info("stats")["total_commands_processed"]
        found, calls = transport.updates.names(), calls + 1
        assert raw.info("stats")["total_commands_processed"] - before < 3_000, "half a minute of lookups for each read"
    assert found == ["a"] and calls < 100


def test_the_names_of_islands_that_are_gone_are_forgotten(
    transport: RedisTransport, raw: Any, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's loop may get another name at each start. What new islands send must be read all the same."""
    monkeypatch.setattr(updates, "FORGET_SECONDS", 0.0)
    keys, beat = Keys(transport.run), to_fields(samples.heartbeat("b"))
    _, kept = (transport.island.publish(samples.contribution(island=name), b"payload") for name in ("x", "y"))
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([kept]))
    transport.island.heartbeat(samples.heartbeat("z"))
    with raw.pipeline(transaction=False) as pipe:
        for number in range(ISLANDS_MAX):
            pipe.sadd(keys.islands, name := f"b{number}")
            pipe.hset(keys.island(name), mapping={**beat, "island": name})
            pipe.pexpire(keys.island(name), 1000 * (REMEMBER_SECONDS - 60 - 20 * number))
        pipe.execute()
    while len(transport.updates.names()) < ISLANDS_MAX:
        pass
    new = transport.island.publish(samples.contribution(island="new"), b"payload")
    found = []
    for _ in range(4):
        transport.merger.forget(epoch, transport.reader.presences())
        found += [delivery.entry for delivery in transport.merger.updates(0.0)]
    assert found == [new]
    left = {"new", "x", "z", *(f"b{number}" for number in range(SILENT_KEPT))}
    assert set(transport.updates.names()) == left == {name.decode() for name in raw.smembers(keys.islands)}
    assert transport.reader.counters().pending == 2
    assert not raw.exists(keys.island(f"b{SILENT_KEPT}"), keys.updates(f"b{SILENT_KEPT}"))
    assert not transport.merger.read([kept])[0].fault, "what an island sent outlives its name"
    evaluation = Evaluation(1, 4, 100, 1.7e9, 5.0, "y")
    transport.reader.record_evaluation(evaluation)
    raw.sadd(keys.islands, "y")
    # Lua cannot unpack so many fields.
    raw.xadd(keys.said("y")[1], {"by": "y", **{f"f{number}": "x" for number in range(5_000)}})
    with pytest.raises(FencedError):
        transport.merger.forget(epoch - 1, [])
    assert raw.sismember(keys.islands, "y"), "a merger that was overtaken forgets nobody"
    for _ in range(2):  # the evaluations of an island are moved first
        transport.merger.forget(epoch, transport.reader.presences())
        assert transport.reader.evaluations() == [evaluation]
    assert "y" not in transport.updates.names()
    raw.sadd(keys.islands, "x" * (1 << 20))
    before = raw.info("stats")["total_net_output_bytes"]
    invited = updates.IslandNames(transport.connection, lambda: ["nobody", "z"])
    assert invited.all() == ["z"]
    invited.forget(Write(), [])
    assert raw.info("stats")["total_net_output_bytes"] - before < 1 << 20, "a run with invitations reads no other names"


def test_unreadable_names_and_heartbeats_do_not_hide_the_others(
    transport: RedisTransport, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Other clients of the server may add anything to the sets of names."""
    keys = Keys(transport.run)
    for island in ("a", "b", "c"):
        transport.island.heartbeat(samples.heartbeat(island))
    raw.sadd(keys.islands, b"\xff\xfe", "a b", "x" * 65)
    raw.sadd(REGISTRY, b"\xff\xfe")
    raw.hset(keys.island("b"), "loss", "inf")
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert [p.heartbeat.island for p in transport.reader.presences()] == ["a", "c"]
        assert len([r for r in caplog.records if "the heartbeat of b cannot be read" in r.getMessage()]) == 1
        assert transport.run in transport.reader.runs()
    finally:
        raw.srem(REGISTRY, b"\xff\xfe")
    raw.hset(keys.island("b"), "loss", "1.5")
    assert len(transport.reader.presences()) == 3
