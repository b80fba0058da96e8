"""What every transport promises about a run: its creation, lease, events, operators, and restoring.

Contributions and rounds are in `test_transport_rounds.py`, and the calls of islands in `test_transport_islands.py`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from archipelago.broker.commits import START, Renewal
from archipelago.broker.errors import FencedError, RunExistsError, UnknownRunError, WireError
from archipelago.broker.messages import Call, Counters, Evaluation, Marker, Note, Resume, Snapshot
from archipelago.broker.transport import NOTES_EACH, NOTES_KEPT, REFUSALS_AMONG, STANDBY_SECONDS, Memory, Transport
from tests import samples
from tests.conftest import Until
from tests.contract.transports import BOTH_SIZES, Connect, delete_manifest, everywhere, publish
from tests.samples import REFUSAL, WIDTH, with_payloads

# -- creating ------------------------------------------------------------------------------------------------------


def test_a_run_that_was_not_created_is_unknown(connections: Connect) -> None:
    transport = connections()
    calls: list[Callable[[], object]] = [
        transport.reader.manifest,
        lambda: transport.merger.acquire("merger", 10.0),
        lambda: transport.reader.steer({"merging": "paused"}),
    ]
    for call in calls:
        with pytest.raises(UnknownRunError):
            call()


@everywhere
def test_creating_a_run_writes_it_once(transport: Transport, connections: Connect) -> None:
    manifest, other = samples.manifest(transport.run, width=WIDTH), connections()
    with pytest.raises(RunExistsError):
        other.create(manifest, samples.first_snapshots(manifest, value=1.0))
    assert other.reader.manifest() == manifest
    for expected in samples.first_snapshots(manifest):
        assert other.reader.fragment(expected[0].fragment) == expected
    assert transport.run in other.reader.runs()


@everywhere
def test_a_new_run_is_empty(transport: Transport, connections: Connect) -> None:
    assert transport.reader.merger_state() == ""
    assert transport.reader.counters() == Counters()
    assert transport.reader.tape(5) == []
    assert transport.reader.presences() == []
    assert transport.merger.updates(0.0) == []
    assert isinstance(transport.reader.fragment(1)[0], Snapshot)
    assert (transport.reader.backlog(), samples.pending(transport)) == (0, (0, 0))
    assert transport.reader.cursors() == {}
    assert transport.island.open_requests() == []
    assert transport.island.handed_over("a/x") is None
    assert transport.merger.read([]) == []
    memory = transport.reader.memory()
    assert isinstance(memory, Memory)
    assert min(memory.used, memory.limit) >= 0
    assert transport.reader.instance() == connections().reader.instance()


def test_a_run_without_its_manifest_can_be_created_again(
    transport: Transport, connections: Connect, epoch: int
) -> None:
    transport.island.publish(samples.contribution(), b"payload")
    transport.merger.commit(epoch, samples.commit([], cursors={"0": (1, 2)}))
    transport.island.register_corpus("site", "1" * 32)
    transport.island.request_state("a/x")
    transport.reader.steer({"merging": "paused", "island.a": "expel"})
    transport.reader.note(Note(1.0, "a", "left", "it was stopped"))
    delete_manifest(transport)
    again = connections()
    manifest = samples.manifest(again.run)
    again.create(manifest, samples.first_snapshots(manifest))
    reader = again.reader
    assert (reader.tape(9), reader.events(START, 0.0), reader.notes(9), reader.control()) == ([], [], [], {})
    assert (reader.backlog(), reader.merger_state(), reader.counters(), reader.cursors()) == (0, "", Counters(), {})
    with pytest.raises(WireError):
        again.merger.outer(0, 1)
    assert again.island.register_corpus("site", "2" * 32) == "2" * 32
    assert again.island.promise_answer("a/x", "b/y") is False
    assert reader.fragment(0) == samples.first_snapshots(manifest)[0]


# -- the lease of the merger ---------------------------------------------------------------------------------------


@everywhere
def test_only_one_merger_holds_the_lease(transport: Transport, connections: Connect, epoch: int) -> None:
    other = connections()
    assert other.reader.is_served() and other.island.heartbeat(samples.heartbeat())
    assert other.merger.acquire("second", 10.0) is None
    assert other.merger.acquire("second", 60.0, {"living"}.__contains__) is None
    assert other.merger.acquire("second", 60.0, {"merger"}.__contains__) == epoch + 1
    assert other.merger.acquire("third", 60.0, {"merger"}.__contains__) is None
    other.merger.renew(epoch + 1, "second", 10.0)
    other.merger.release(epoch + 1)
    assert not other.reader.is_served() and not other.island.heartbeat(samples.heartbeat())
    assert connections().merger.acquire("third", 10.0) == epoch + 2


def test_a_lease_expires(transport: Transport, connections: Connect, until: Until) -> None:
    transport.merger.acquire("first", 0.05)
    other = connections()
    until(lambda: other.merger.acquire("second", 10.0), "the lease to run out")


@everywhere
def test_the_older_epoch_is_refused(transport: Transport, connections: Connect) -> None:
    kept, _ = publish(transport, 2)
    old = transport.merger.acquire("first", 10.0)
    assert old is not None
    _, delivery = transport.merger.updates(0.0)
    commit = samples.commit([kept])
    transport.merger.commit(old, commit)
    events, tape = transport.reader.events(START, 0.0), transport.reader.tape(10)
    assert commit.compaction is not None
    placed = transport.merger.place(old, commit.compaction)
    transport.merger.release(old)
    newer = connections()
    new = newer.merger.acquire("second", 10.0)
    assert new is not None
    assert new > old
    writes: list[Callable[[], object]] = [
        lambda: transport.merger.commit(old, samples.commit([delivery.entry])),
        lambda: transport.merger.compact(old, placed, after_round=1),
        lambda: samples.refuse(transport, old, [(delivery.entry, REFUSAL)]),
        lambda: transport.merger.announce(old, Call(1, 0)),
        lambda: transport.merger.trim(old, [kept]),
        lambda: transport.merger.renew(old, "first", 10.0),
        lambda: transport.merger.look(0.0, renewal=Renewal(old, "first", 10.0)),
        lambda: transport.merger.release(old),
    ]
    for write in writes:
        with pytest.raises(FencedError):
            write()
    assert newer.reader.events(START, 0.0) == events
    assert newer.reader.tape(10) == tape
    assert newer.reader.backlog() == 1
    newer.merger.commit(new, samples.commit([delivery.entry]))
    assert newer.reader.backlog() == 0


@everywhere
def test_standbys_are_listed_until_they_leave(transport: Transport, connections: Connect) -> None:
    assert transport.reader.standbys() == []
    for name in ("b", "a", "b"):
        transport.merger.stand_by(name)
    found = connections().reader.standbys()
    assert [standby.name for standby in found] == ["a", "b"]
    assert all(0.0 <= standby.age_seconds < STANDBY_SECONDS for standby in found)
    transport.merger.stand_down("a")
    transport.merger.stand_down("never")
    assert [standby.name for standby in connections().reader.standbys()] == ["b"]


# -- events --------------------------------------------------------------------------------------------------------


def test_events_can_be_read_from_any_id(transport: Transport, epoch: int) -> None:
    assert transport.reader.last_event() == START
    transport.merger.announce(epoch, Call(1, 0))
    after_first = transport.reader.last_event()
    later: list[Resume | Marker] = [Resume(1, epoch), Marker(1, 0)]
    transport.merger.announce(epoch, *later)
    assert [event for _, event in transport.reader.events(START, 0.0)] == [Call(1, 0), *later]
    assert [event for _, event in transport.reader.events(after_first, 0.0)] == later
    for wait in (0.0, 0.02):
        assert transport.reader.events(transport.reader.last_event(), wait) == []


def test_events_and_updates_wait_for_the_first(transport: Transport, connections: Connect, epoch: int) -> None:
    caller = threading.Timer(0.05, lambda: transport.merger.announce(epoch, Call(1, 0)))
    caller.start()
    found = connections().reader.events(START, 10.0)
    caller.join()
    assert [event for _, event in found] == [Call(1, 0)]
    sender = threading.Timer(0.05, lambda: connections().island.publish(samples.contribution(), b"payload"))
    sender.start()
    deliveries = transport.merger.updates(10.0)
    sender.join()
    assert len(deliveries) == 1


def test_the_newest_refusals_are_found_among_the_events(transport: Transport, connections: Connect, epoch: int) -> None:
    other = connections()
    assert other.reader.refusals(9) == []
    for number, entry in enumerate(publish(transport, 4)):
        transport.merger.announce(epoch, Call(number + 1, 0))
        transport.merger.updates(0.0)
        samples.refuse(transport, epoch, [(entry, replace(REFUSAL, sequence=number, reason=f"reason {number}"))])
        transport.merger.announce(epoch, Marker(number + 1, number))
    found = other.reader.refusals(2)
    assert [refusal for _, refusal in found] == [
        replace(REFUSAL, sequence=number, reason=f"reason {number}") for number in (2, 3)
    ]
    assert 0.0 < found[0][0] <= found[1][0] < found[0][0] + 600.0
    assert len(other.reader.refusals(99)) == 4
    assert other.reader.refusals(0) == []
    transport.merger.announce(epoch, *[Call(9, 0)] * (REFUSALS_AMONG - 2))  # One marker follows the last refusal.
    assert [refusal.sequence for _, refusal in other.reader.refusals(99)] == [3]


# -- what readers see, and operators change -----------------------------------------------------------------------


@everywhere
def test_heartbeats_replace_each_other(transport: Transport, connections: Connect) -> None:
    began = time.monotonic()
    transport.island.heartbeat(samples.heartbeat("b"))
    transport.island.heartbeat(samples.heartbeat("a", steps=1))
    transport.island.heartbeat(samples.heartbeat("a", steps=2, state="left"))
    first, second = connections().reader.presences()
    assert first.heartbeat == samples.heartbeat("a", steps=2, state="left")
    assert second.heartbeat.island == "b"
    assert 0.0 <= first.age_seconds < time.monotonic() - began + 1.0


@everywhere
def test_evaluations_and_notes_are_kept_in_order(transport: Transport, connections: Connect) -> None:
    for n in range(3):
        transport.reader.record_evaluation(Evaluation(n, n, 10 * n, 1.7e9 + n, 5.0 - n, by=("b", "", "a")[n]))
    assert [e.bits_per_byte for e in transport.reader.evaluations()] == [5.0, 4.0, 3.0]
    assert transport.reader.notes(9) == []
    notes = [Note(1.7e9 + n / 3, f"i{n % 70}", "joined", f"note {n}") for n in range(NOTES_KEPT + 5)]
    notes += [Note(1.71e9, "merger", "served", "epoch 1"), Note(1.72e9, "b", "left", "it was stopped")]
    for note in notes:
        transport.reader.note(note)
    other = connections()
    assert other.reader.notes(3) == notes[-3:]
    assert other.reader.notes(0) == []
    assert other.reader.notes(1 << 20) == notes[-NOTES_KEPT:], "only the newest ones are kept"
    notes = [Note(1.73e9 + n, "a", "joined", f"note {n}") for n in range(NOTES_EACH + 1)]
    for note in notes:
        transport.reader.note(note)
    assert [note for note in other.reader.notes(99) if note.who == "a"] == notes[1:], "nobody pushes out the others'"


@everywhere
def test_operator_controls_are_changed_together_and_heard_with_heartbeats(
    transport: Transport, connections: Connect
) -> None:
    other = connections()
    assert other.reader.control() == {}
    transport.reader.steer({"outer.learning_rate": "0.5", "merging": "paused", "sync.quorum": ""})
    assert other.reader.control() == {"outer.learning_rate": "0.5", "merging": "paused"}
    transport.reader.steer({"outer.learning_rate": "0.25", "merging": "", "island.a": "drain"})
    assert other.reader.control() == {"outer.learning_rate": "0.25", "island.a": "drain"}
    transport.reader.steer({"outer.learning_rate": "", "island.a": ""})
    assert other.reader.control() == transport.island.look_around("a", None).requests == {}
    transport.reader.steer({})
    transport.reader.steer({"island.a": "drain", "island.b": "expel", "merging": "paused", "inner.steps": "9"})
    for island, request in (("a", {"island.a": "drain"}), ("b", {"island.b": "expel"}), ("c", {})):
        assert transport.island.look_around(island, None).requests == {**request, "inner.steps": "9"}, island


# -- restoring -----------------------------------------------------------------------------------------------------


@BOTH_SIZES
def test_a_checkpoint_restores_everything(connections: Connect, payload: bytes) -> None:
    made = connections()
    manifest = samples.manifest(made.run, width=WIDTH)
    pending = [(samples.contribution(payload, sequence=n, tokens=10 + n), payload) for n in range(2)]
    image = samples.image(manifest, pending, noise=payload)
    made.restore(image)
    other = connections()
    assert other.reader.manifest() == manifest
    packed = [full.packed(manifest.config.wire) for full in image.fragments]
    assert [other.reader.fragment(p) for p in range(2)] == [(each.snapshot, each.payload) for each in packed]
    assert other.merger.outer(0, 1) == packed[0].outer
    assert (other.reader.merger_state(), other.reader.cursors()) == (image.state, image.cursors)
    assert (other.reader.tape(9), other.reader.evaluations()) == (image.tape, image.evaluations)
    assert other.reader.events(START, 0.0) == []
    assert (other.reader.backlog(), samples.pending(other)) == (2, (2, 21))
    assert other.reader.counters() == Counters(3 + 2, 300 + 21, 2, 200, 1, 100, 5000)
    assert made.run in other.reader.runs()
    assert [(d.contribution, d.payload) for d in with_payloads(other.merger.updates(0.0))] == pending


@everywhere
def test_a_restored_run_continues(connections: Connect) -> None:
    made = connections()
    manifest = samples.manifest(made.run)
    controls = {"sync.quorum": "3", "island.a": "expel"}
    state = json.dumps({"closed": 1, "control": controls | {"merging": "perhaps", "nonsense": "1"}})
    made.restore(samples.image(manifest, [(samples.contribution(), b"payload")], state=state))
    assert made.reader.control() == controls, "only valid ones are restored"
    epoch = made.merger.acquire("merger", 10.0)
    assert epoch is not None
    (delivery,) = made.merger.updates(0.0)
    made.merger.commit(epoch, samples.commit([delivery.entry], round_number=3, cursors={"0": (1, 0)}))
    assert made.reader.fragment(0)[0].version == 2
    assert [entry.round for entry in made.reader.tape(9)] == [1, 3]
    assert made.reader.cursors() == {"0": (1, 0), "7": (2, 0)}
    assert made.reader.backlog() == 0


def test_an_existing_run_is_not_overwritten_by_a_restore(transport: Transport, connections: Connect) -> None:
    transport.island.publish(samples.contribution(), b"payload")
    with pytest.raises(RunExistsError):
        connections().restore(samples.image(transport.reader.manifest(), []))
    assert transport.reader.fragment(0) == samples.first_snapshots(transport.reader.manifest())[0]
    assert (transport.reader.backlog(), transport.reader.counters().merged) == (1, 0)
