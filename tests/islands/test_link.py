"""The background link: the training thread never waits for it, and what it carries arrives once and in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from broker.config import DataConfig, InnerConfig, RunConfig, SyncConfig
from broker.errors import UnreachableError
from broker.manifest import Corpus, Manifest, Tensor
from broker.memory import MemoryBroker, MemoryTransport
from broker.messages import Call, Contribution, Event, Heartbeat, Refusal, Resume, Snapshot
from broker.transport import Commit
from broker.wire import digest, pack, unpack
from islands import link as link_module
from islands.batches import Batches
from islands.inner import compile_steps
from islands.link import Draft, Link
from islands.model import Model, Params
from islands.worker import Island, train
from merger.service import Merger
from tests import samples

SIZE = 32
"""elements of either fragment of the sample run"""
Until = Callable[..., None]


class Sea(MemoryTransport):
    """A transport on which every call can be made to hang, to fail, or to do something more."""

    def __init__(self, broker: MemoryBroker, run: str) -> None:
        super().__init__(broker, run)
        self.calm = threading.Event()
        self.calm.set()
        self.outage: Exception | None = None
        self.hanging = 0
        self.lock = threading.Lock()
        self.before_publish_returns: Callable[[], None] = lambda: None
        self.torn = 0
        """so many fragments are handed out damaged"""

    def _pass(self) -> None:
        if not self.calm.is_set():
            with self.lock:
                self.hanging += 1
            self.calm.wait()
        if self.outage is not None:
            raise self.outage

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        self._pass()
        entry = super().publish(contribution, payload)
        self.before_publish_returns()
        return entry

    def holds(self, entry: str) -> bool:
        self._pass()
        return super().holds(entry)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self._pass()
        super().heartbeat(heartbeat)

    def claim_shard(self) -> int:
        self._pass()
        return super().claim_shard()

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        self._pass()
        return super().events(after, block_seconds, count)

    def fragment(self, fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        self._pass()
        snapshot, payload = super().fragment(fragment, account=account)
        if self.torn:
            self.torn -= 1
            return snapshot, payload[:-1] + b"?"
        return snapshot, payload


class Shore:
    """The other end: a broker with a run on it, the merger's side played by the test."""

    def __init__(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self.manifest = manifest
        self.broker = MemoryBroker()
        self.transport = self.broker.connect(manifest.run)
        self.transport.create(manifest, snapshots)
        self.epoch = self.transport.acquire("merger", 1e6) or 0
        self.seas: list[Sea] = []
        self.links: list[Link] = []

    def link(self) -> Link:
        """An island's link, that has joined."""
        sea = Sea(self.broker, self.manifest.run)
        link = Link(sea, self.manifest)
        link.join()
        self.seas.append(sea)
        self.links.append(link)
        return link

    @property
    def sea(self) -> Sea:
        return self.seas[-1]

    def call(self, number: int) -> Call:
        call = Call(number, (number - 1) % 2)
        self.transport.announce(self.epoch, call)
        return call

    def resume(self, number: int) -> Resume:
        resume = Resume(number, self.epoch)
        self.transport.announce(self.epoch, resume)
        return resume

    def close(self, number: int, value: float, *merged: Contribution) -> Snapshot:
        """A round closes: its fragment is all `value` now."""
        payload = pack(np.full(SIZE, value, np.float32), "float32", 1)
        plain = samples.commit([], payload, number)
        snapshot = replace(plain.snapshot, fragment=(number - 1) % 2, merged=" ".join(c.identity_text for c in merged))
        entries = [d.entry for d in self.deliveries() if d.contribution in merged]
        self.transport.commit(self.epoch, Commit(snapshot, payload, b"", "{}", plain.tape, entries, 0))
        return snapshot

    def refuse(self, contribution: Contribution, *, repeat: bool = False) -> Refusal:
        c = contribution
        refusal = Refusal(c.island, c.incarnation, c.sequence, c.round, c.fragment, c.tokens, "no", repeat)
        entry = next(d.entry for d in self.deliveries() if d.contribution == contribution)
        self.transport.refuse(self.epoch, [(entry, refusal)])
        return refusal

    def deliveries(self) -> list[Any]:
        """All that is published and not ended."""
        self.transport.updates(0.0)
        return self.transport.unacknowledged()

    def published(self) -> list[Contribution]:
        return [delivery.contribution for delivery in self.deliveries()]

    def forget(self, entry: str) -> None:
        """What a server that crashed may do to what it had acknowledged."""
        del self.broker.runs[self.manifest.run].updates[int(entry.split("-")[0])]


@pytest.fixture
def shore(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shore]:
    """A sample run. Afterwards nothing hangs any more, and no thread is left."""
    monkeypatch.setattr(link_module, "RETRY_SECONDS", (0.001, 0.002))
    monkeypatch.setattr(link_module, "BLOCK_SECONDS", 0.01)
    monkeypatch.setattr(link_module, "HEARTBEAT_SECONDS", 0.01)
    manifest = samples.manifest()
    made = Shore(manifest, samples.first_snapshots(manifest))
    yield made
    _put_away(made)


def _put_away(shore: Shore) -> None:
    for sea in shore.seas:
        sea.outage = None
        sea.calm.set()
    for link in shore.links:
        link.stop(30.0)
        assert not any(thread.is_alive() for thread in link._threads)


def draft(number: int, sequence: int | None = None) -> Draft:
    """A contribution to that round, all of whose elements are its number."""
    sequence = number if sequence is None else sequence
    contribution = samples.contribution(round=number, fragment=(number - 1) % 2, sequence=sequence, bytes=0)
    return Draft(replace(contribution, digest=""), jnp.full(SIZE, float(number), jnp.float32))


def at_once(work: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Its result; fails, instead of hanging with it, when it hangs. How long it may take only a hang exceeds."""
    out: list[Any] = []

    def keep() -> None:
        try:
            out.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            out.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(seconds)
    assert out, f"it still hangs after {seconds:.0f} s"
    if isinstance(out[0], BaseException):
        raise out[0]
    return out[0]


# -- without threads -----------------------------------------------------------------------------------------------


def test_joining_brings_all_fragments_a_shard_and_a_place_in_the_stream(shore: Shore) -> None:
    shore.call(1)
    closed = shore.close(1, 7.0)
    link = Link(Sea(shore.broker, "sample"), shore.manifest)
    first, second = link.join()
    assert (first.snapshot, first.params_N.tolist()) == (closed, [7.0] * SIZE)
    assert (second.snapshot.version, second.params_N.tolist()) == (0, [0.0] * SIZE)
    assert link.claim() == 0
    later = shore.call(2)
    link.pump()
    assert link.take() == ([later], [])
    assert link.bytes_down == shore.transport.books().bytes_down


def test_nothing_that_happens_while_joining_is_missed(shore: Shore) -> None:
    sea = Sea(shore.broker, "sample")
    link = Link(sea, shore.manifest)
    snapshot = sea.fragment

    def closes_meanwhile(fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        if fragment == 1:
            shore.close(1, 5.0)
        return snapshot(fragment, account=account)

    sea.fragment = closes_meanwhile  # type: ignore[method-assign]
    link.join()
    sea.fragment = snapshot  # type: ignore[method-assign]
    link.pump()
    events, (arrival,) = link.take()
    assert [event.round for event in events] == [1]
    assert arrival.params_N.tolist() == [5.0] * SIZE


def test_what_is_sent_is_published_in_order_with_its_bytes_and_digest(shore: Shore) -> None:
    link = shore.link()
    for number in (1, 2, 3):
        link.send(draft(number))
    assert link.backlog == 3
    link.pump()
    assert [d.contribution.round for d in shore.deliveries()] == [1, 2, 3]
    for delivery in shore.deliveries():
        assert delivery.contribution.bytes == len(delivery.payload)
        assert delivery.contribution.digest == digest(delivery.payload)
        assert unpack(delivery.payload, SIZE).tolist() == [float(delivery.contribution.round)] * SIZE
    assert (link.backlog, link.sent) == (0, 3)
    assert link.bytes_up == shore.transport.books().bytes_up


def test_events_come_in_order_and_of_each_fragment_only_the_newest_snapshot(shore: Shore) -> None:
    link = shore.link()
    happened: list[Event] = [shore.call(1), shore.close(1, 1.0), shore.close(2, 2.0), shore.close(3, 3.0)]
    link.pump()
    events, arrivals = link.take()
    assert events == happened
    assert {a.snapshot.round: a.params_N[0] for a in arrivals} == {3: 3.0, 2: 2.0}
    assert link.take() == ([], [])


def test_an_older_arrival_that_nobody_took_gives_way_to_the_newer(shore: Shore) -> None:
    link = shore.link()
    shore.close(1, 1.0)
    link.pump()
    shore.close(3, 3.0)
    link.pump()
    events, arrivals = link.take()
    assert [event.round for event in events] == [1, 3]
    assert [a.snapshot.round for a in arrivals] == [3]


def test_every_ordinal_is_claimed_once_and_one_is_kept_at_hand(shore: Shore) -> None:
    one, other = shore.link(), shore.link()
    assert [one.claim(), one.claim(), other.claim()] == [0, None, 1]
    one.pump()
    assert [one.claim(), one.claim()] == [2, None]


def test_the_newest_heartbeat_goes_out(shore: Shore) -> None:
    link = shore.link()
    link.pump()
    assert shore.transport.presences() == []
    for steps in (1, 2):
        link.beat(samples.heartbeat(steps=steps))
    link.pump()
    (presence,) = shore.transport.presences()
    assert presence.heartbeat.steps == 2


def test_a_snapshot_that_is_damaged_is_fetched_again(shore: Shore) -> None:
    link = shore.link()
    shore.close(1, 1.0)
    shore.sea.torn = 1
    link.pump_heartbeat()
    with pytest.raises(Exception, match="not the announced one"):
        link.pump_receive()
    events, arrivals = link.take()
    assert (len(events), arrivals) == (1, [])
    link.pump_receive()
    assert [a.params_N[0] for a in link.take()[1]] == [1.0]
    had = link.bytes_down
    link.pump_receive()
    assert (link.take(), link.bytes_down) == (([], []), had)  # and not once more


def test_an_outage_is_told_and_loses_nothing(shore: Shore) -> None:
    link = shore.link()
    link.send(draft(1))
    link.pump()
    shore.sea.outage = UnreachableError("nobody answers")
    for number in (2, 3):
        link.send(draft(number))
        link.beat(samples.heartbeat(steps=number))
        link.pump()
    happened: list[Event] = [shore.call(2), shore.close(1, 1.0), shore.close(2, 2.0)]
    link.pump()
    assert link.trouble == "nobody answers"
    assert link.take() == ([], [])
    assert link.backlog == 2
    shore.sea.outage = None
    link.pump()
    assert link.trouble == ""
    assert [c.round for c in shore.published()] == [1, 2, 3]
    events, arrivals = link.take()
    assert events == happened
    assert [a.snapshot.round for a in arrivals] == [1, 2]
    assert shore.transport.presences()[0].heartbeat.steps == 3


# -- until the merger has decided ----------------------------------------------------------------------------------


def test_a_contribution_is_unresolved_until_it_is_merged_or_refused(shore: Shore) -> None:
    link = shore.link()
    for number in (1, 2, 3):
        link.send(draft(number))
        assert link.unresolved_rounds() == set(range(1, number + 1))  # queued ones too
    link.pump()
    first, second, third = shore.published()
    shore.close(1, 1.0, first)
    shore.refuse(third)
    link.pump()
    assert link.unresolved_rounds() == {2}
    shore.close(2, 1.0)  # without it: it waits for a later one
    link.pump()
    assert link.unresolved_rounds() == {2}
    shore.close(4, 1.0, second)
    link.pump()
    assert link.unresolved_rounds() == set()


def test_the_refusal_of_a_repeat_leaves_the_first_one_unresolved(shore: Shore) -> None:
    link = shore.link()
    link.send(draft(1))
    link.pump()
    (sent,) = shore.published()
    shore.transport.publish(sent, b"again")
    shore.refuse(sent, repeat=True)
    link.pump()
    assert link.unresolved_rounds() == {1}


def test_what_a_broker_lost_is_sent_again_once_when_a_merger_resumes(shore: Shore) -> None:
    link = shore.link()
    for number in (1, 2, 3):
        link.send(draft(number))
    link.pump()
    first, lost, _ = shore.deliveries()
    shore.close(1, 1.0, first.contribution)
    shore.forget(lost.entry)
    link.pump()
    assert [c.round for c in shore.published()] == [3]
    shore.resume(1)
    link.pump()
    assert [c.round for c in shore.published()] == [3, 2]
    assert shore.deliveries()[1].contribution == lost.contribution
    assert shore.deliveries()[1].payload == lost.payload
    shore.resume(1)
    link.pump()
    assert len(shore.deliveries()) == 2


def test_a_resume_is_heard_again_when_an_outage_cut_it_short(shore: Shore) -> None:
    link = shore.link()
    for number in (1, 2):
        link.send(draft(number))
    link.pump()
    for delivery in shore.deliveries():
        shore.forget(delivery.entry)
    resume = shore.resume(0)
    hears, shore.sea.outage = shore.sea.events, UnreachableError("nobody answers")

    def only_events_come_through(*arguments: Any) -> Any:
        shore.sea.outage = None
        found = hears(*arguments)
        shore.sea.outage = UnreachableError("nobody answers")
        return found

    shore.sea.events = only_events_come_through  # type: ignore[method-assign, assignment]
    link.pump()
    assert link.take() == ([], [])
    shore.sea.events, shore.sea.outage = hears, None  # type: ignore[method-assign]
    link.pump()
    assert link.take() == ([resume], [])
    assert [c.round for c in shore.published()] == [1, 2]


def test_a_broker_that_went_back_is_followed(shore: Shore) -> None:
    link = shore.link()
    kept = [shore.transport.fragment(p) for p in range(2)]
    for number in (1, 2, 3):
        shore.close(number, float(number))
    link.pump()  # and nobody takes what came
    run = shore.broker.runs["sample"]
    run.fragments = dict(enumerate(kept))
    resume = shore.resume(0)
    link.pump_receive()
    events, arrivals = link.take()
    assert events[-1] == resume
    assert [(a.snapshot.version, a.params_N[0]) for a in arrivals] == [(0, 0.0), (0, 0.0)]


def test_what_went_back_does_not_come_with_snapshots_from_before(shore: Shore) -> None:
    """Else their round numbers would be believed again."""
    link = shore.link()
    shore.close(1, 1.0)
    link.pump()
    resume = shore.resume(0)
    shore.sea.torn = 1
    with pytest.raises(Exception, match="not the announced one"):
        link.pump_receive()
    events, arrivals = link.take()
    assert events[-1] == resume
    assert arrivals == []


def test_a_decision_that_is_heard_before_publishing_returns_is_not_missed(shore: Shore) -> None:
    link = shore.link()

    def merge_at_once() -> None:
        shore.close(1, 1.0, *shore.published())
        link.pump_receive()

    shore.sea.before_publish_returns = merge_at_once
    link.send(draft(1))
    link.pump_send()
    assert link.unresolved_rounds() == set()


@pytest.mark.parametrize("refused", [False, True])
def test_what_got_through_in_spite_of_an_error_and_is_decided_is_not_sent_again(shore: Shore, refused: bool) -> None:
    link = shore.link()
    link.send(draft(1))
    link.send(draft(2))

    def break_off() -> None:
        raise UnreachableError("the connection broke")

    shore.sea.before_publish_returns = break_off
    link.pump()
    assert link.backlog == 2
    assert link.unresolved_rounds() == {1, 2}
    (sent,) = shore.published()
    if refused:
        shore.refuse(sent)
    else:
        shore.close(1, 1.0, sent)
    link.pump_receive()
    shore.sea.before_publish_returns = lambda: None
    link.pump()
    assert (link.backlog, link.sent) == (0, 2)
    assert [c.round for c in shore.published()] == [2]
    assert link.unresolved_rounds() == {2}


def test_what_nobody_is_sure_of_is_sent_again_and_nothing_else_is(shore: Shore) -> None:
    link = shore.link()
    link.send(draft(1))
    answers = iter([UnreachableError("the connection broke"), None])

    def break_off_once() -> None:
        if error := next(answers):
            raise error

    shore.sea.before_publish_returns = break_off_once
    link.pump()
    shore.resume(0)
    link.pump_receive()  # it is still queued: nobody resends it meanwhile
    assert len(shore.published()) == 1
    link.pump()
    first, second = shore.published()
    assert first == second  # the merger takes one of the two
    assert link.backlog == 0


# -- with threads --------------------------------------------------------------------------------------------------


def hang(shore: Shore, link: Link, until: Until) -> None:
    """Starts the pumps, and waits until each of them hangs."""
    shore.sea.calm.clear()
    link.send(draft(1))
    link.beat(samples.heartbeat())
    link.start()
    until(lambda: shore.sea.hanging >= 3, "all pumps to hang")


def test_the_training_thread_waits_for_nothing_that_hangs(shore: Shore, until: Until) -> None:
    link = shore.link()
    hang(shore, link, until)

    def use() -> list[Any]:
        out: list[Any] = [link.claim(), link.claim()]
        for number in range(2, 50):
            link.send(draft(number))
            link.beat(samples.heartbeat(steps=number))
            out.append(link.take())
        return [*out, link.unresolved_rounds(), link.backlog]

    found = at_once(use)
    assert found[:2] == [0, None]
    assert found[2:-2] == [([], [])] * 48
    assert found[-2:] == [set(range(1, 50)), 49]
    shore.sea.calm.set()
    until(lambda: link.backlog == 0, "the queue to be sent")
    assert [c.round for c in shore.published()] == list(range(1, 50))
    until(lambda: shore.transport.presences()[0].heartbeat.steps == 49, "the newest heartbeat")


def test_after_an_outage_everything_arrives_once_and_in_order(shore: Shore, until: Until) -> None:
    link = shore.link()
    link.start()
    shore.sea.outage = UnreachableError("nobody answers")
    until(lambda: link.trouble == "nobody answers", "the trouble to be noted")
    for number in range(1, 6):
        link.send(draft(number))
    happened: list[Event] = [shore.call(1), *(shore.close(number, float(number)) for number in range(1, 6))]
    assert shore.published() == []
    shore.sea.outage = None
    until(lambda: link.trouble == "" and link.backlog == 0, "the trouble to be over")
    assert [c.round for c in shore.published()] == list(range(1, 6))
    events: list[Event] = []
    newest: dict[int, float] = {}

    def heard() -> bool:
        more, arrivals = link.take()
        events.extend(more)
        newest.update({a.snapshot.fragment: float(a.params_N[0]) for a in arrivals})
        return len(events) == len(happened) and newest == {0: 5.0, 1: 4.0}

    until(heard, "everything that was announced")
    assert events == happened


def test_an_error_that_no_retry_mends_surfaces(shore: Shore, until: Until) -> None:
    link = shore.link()
    shore.sea.outage = ZeroDivisionError("a bug")
    link.send(draft(1))
    link.start()
    until(lambda: link.failure is not None, "the failure to surface")
    assert isinstance(link.failure, ZeroDivisionError)
    assert at_once(lambda: link.drain(3600.0)) is False


def test_a_drain_in_progress_ends_when_the_link_fails(shore: Shore, until: Until) -> None:
    link = shore.link()
    hang(shore, link, until)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(link.drain(3600.0)), daemon=True)
    thread.start()
    shore.sea.outage = ZeroDivisionError("a bug")
    shore.sea.calm.set()
    until(lambda: drained, "the drain to give up")
    assert drained == [False]


def test_stopping_ends_in_time_although_every_pump_hangs(shore: Shore, until: Until) -> None:
    link = shore.link()
    hang(shore, link, until)
    began = time.monotonic()
    at_once(lambda: link.stop(0.1))
    assert time.monotonic() - began >= 0.1
    assert all(thread.is_alive() for thread in link._threads)  # left behind, as daemons
    assert all(thread.daemon for thread in link._threads)


def test_stopping_ends_all_threads(shore: Shore) -> None:
    link = shore.link()
    link.start()
    link.stop(30.0)
    assert not any(thread.is_alive() for thread in link._threads)


def test_draining_says_whether_everything_got_through(shore: Shore, until: Until) -> None:
    link = shore.link()
    hang(shore, link, until)
    assert link.drain(0.01) is False
    shore.sea.calm.set()
    assert link.drain(30.0) is True
    assert [c.round for c in shore.published()] == [1]
    assert shore.transport.presences()[0].heartbeat == samples.heartbeat()
    link.beat(samples.heartbeat(state="left"))
    assert link.drain(30.0) is True
    assert shore.transport.presences()[0].heartbeat.state == "left"


# -- an island on such a link --------------------------------------------------------------------------------------

CONFIG = RunConfig(
    data=DataConfig(sequence_length=4, batch_size=2, shards=4),
    inner=InnerConfig(steps=1000, learning_rate=0.01, warmup_steps=0),
    sync=SyncConfig(interval=4, fragments=2, window=2, quorum=1, grace=0.0),
)
TENSORS = (Tensor("kernel", (2, 3)), Tensor("scale", (5,)))


def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
    """A bowl whose middle depends on the text."""
    middle = jnp.mean(tokens_BxT1.astype(jnp.float32)) / 100.0
    return jnp.sum((params["kernel"] - middle) ** 2) + jnp.sum((params["scale"] - middle) ** 2)


def no_logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
    raise NotImplementedError


MODEL = Model(lambda seed: {}, loss, TENSORS, no_logits)
STEPS = compile_steps(MODEL, CONFIG.inner)


@pytest.fixture
def coast(shore: Shore) -> Iterator[Shore]:
    """A run of a model so small that its steps take no time."""
    manifest = Manifest("tiny", CONFIG, TENSORS, (("kernel",), ("scale",)), Corpus("text", "0" * 32, 4096), {})
    snapshots = []
    for p, size in enumerate(manifest.sizes):
        payload = pack(np.ones(size, np.float32), "float32", 1)
        snapshots.append((Snapshot(0, p, 0, 0, "float32", len(payload), digest(payload), ""), payload))
    made = Shore(manifest, snapshots)
    made.transport.release(made.epoch)
    yield made
    _put_away(made)


def island_on(coast: Shore, name: str = "a") -> Island:
    link = coast.link()
    arrivals = link.join()
    text = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    island = Island(name, coast.manifest, STEPS, Batches(text, CONFIG, link.claim), link, arrivals)
    island.warm_up()
    return island


def steps_of(island: Island, count: int) -> None:
    for _ in range(count):
        island.boundary()
        island.advance()


def test_an_island_never_blocks(coast: Shore, until: Until) -> None:
    island = island_on(coast)
    coast.sea.calm.clear()
    island.link.start()
    at_once(lambda: steps_of(island, 200))
    assert island.totals.steps == island.ledger.global_step == 200
    assert island.link.backlog == CONFIG.sync.window  # it owes nothing more until it hears of a round
    assert coast.transport.books().published == 0
    # Everything is lost but nothing is stopped; and when the sea is calm again it catches up.
    coast.sea.calm.set()
    merger = Merger(coast.broker.connect("tiny"), live_poll_seconds=0.0)
    assert merger.acquire()
    merger.load()

    def adopted() -> bool:
        merger.turn(0.0)
        steps_of(island, 1)
        return all(count.version >= 3 for count in island.ledger.counts)

    until(adopted, "three versions of every fragment")
    assert at_once(lambda: island.leave())
    merger.turn(0.0)
    books = coast.transport.books()
    assert books.published == books.merged == island.link.sent >= 6
    assert (books.refused, coast.transport.backlog()) == (0, 0)
    members = [member for entry in coast.transport.tape(1000) for member in entry.members]
    tokens = sum(m.tokens for m in members if m.sequence < 2)
    assert tokens == (2 + 4) * CONFIG.tokens_per_step  # what it owed before it was cut off: strides of 2 steps


def test_an_island_never_blocks_in_an_outage_either(coast: Shore, until: Until) -> None:
    island = island_on(coast)
    coast.sea.outage = UnreachableError("nobody answers")
    island.link.start()
    at_once(lambda: steps_of(island, 100))
    assert island.totals.steps == 100
    until(lambda: island.link.trouble, "the trouble to be noted")
    assert at_once(lambda: island.leave(flush_seconds=0.01)) is False


def test_an_island_ends_when_its_link_fails(coast: Shore, until: Until) -> None:
    island = island_on(coast)
    coast.sea.outage = ZeroDivisionError("a bug")
    island.link.start()
    until(lambda: island.link.failure is not None, "the failure to surface")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        train(island, lambda: False)
    assert island.totals.steps == 0
