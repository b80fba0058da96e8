"""A Redis that has lost everything: the run continues from a checkpoint, and is not replaced without a word."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.rejoin import Rejoin
from archipelago.islands.sync.connection.merged import KEPT_MIN
from archipelago.islands.worker import Island
from archipelago.merger.beside import at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch import init
from archipelago.ops.launch.init import InitOptions
from archipelago.ops.watch.run_view import RunView, observe
from tests import samples
from tests.failing import failing
from tests.harness import tiny
from tests.harness.tiny import TinyRun


class LostRun:
    """A run with one island and a checkpoint, whose Redis then loses everything."""

    def __init__(self, folder: Path) -> None:
        url = f"fakeredis://{uuid.uuid4().hex}"
        self.url = url
        self.manifest = replace(tiny.manifest(), uid="1" * 32)
        self.connect: Callable[[], RedisTransport] = lambda: connect(url, "tiny")
        self.run = TinyRun(self.manifest, self.connect)
        self.folder = MergerFolder(folder)
        self.transport = self.connect()
        self.island: Island = self.run.island()
        self.run.merger.transport.merger.release(self.run.merger.epoch)
        self.serve()
        self.run.play(self.island, 12)
        self.run.merger.checkpoint()
        self.run.play(self.island, 18)  # more rounds than the contributions that an island keeps after they were merged
        self.closed = self.run.merger.state.closed
        self.transport.connection.redis.flushall()
        self.island.link.pump()  # it lives, and says so

    def serve(self) -> None:
        """Let a new merger serve the run."""
        checkpointer = self.folder.checkpointer(self.transport, self.manifest, 1e9, at_once)
        self.run.merger = Merger(self.connect(), self.run.clock, live_poll_seconds=0.0, checkpointer=checkpointer)
        assert self.run.merger.acquire()
        self.run.merger.load()


@pytest.fixture
def lost(tmp_path: Path) -> LostRun:
    return LostRun(tmp_path / "merger")


def test_the_merger_names_its_checkpoint(lost: LostRun, tmp_path: Path) -> None:
    with pytest.raises(UnknownRunError) as raised:
        lost.run.merger.acquire()
    found = lost.folder.lost(raised.value, "tiny")
    assert found.code == "broker.resumable"
    assert str(tmp_path / "merger") in found.remedy
    assert MergerFolder(tmp_path / "other").lost(raised.value, "tiny").code == "broker.lost"


def test_the_run_goes_on_from_the_checkpoint_with_its_islands(lost: LostRun) -> None:
    options = InitOptions(url=lost.url, run="tiny", resume=str(lost.folder.path))
    assert init.main(options) == 0
    lost.serve()
    assert 0 < lost.run.merger.state.closed < lost.closed
    lost.run.play(lost.island, 40)
    assert lost.run.merger.state.closed > lost.closed
    assert lost.transport.reader.uid() == lost.manifest.uid
    with failing(RunExistsError):
        init.main(options)


def test_a_new_run_does_not_replace_living_islands(lost: LostRun) -> None:
    with failing(ConfigError, "init.islands-live"):
        init.main(InitOptions(url=lost.url, run="tiny"))
    assert lost.transport.reader.runs() == []
    lost.island.beat("left")
    lost.island.link.pump()
    init.require_no_islands(lost.transport)


def test_a_run_of_which_only_the_name_is_left_is_a_lost_one(lost: LostRun) -> None:
    lost.transport.connection.redis.sadd(REGISTRY, "tiny")
    with failing(ConfigError, "init.islands-live"):
        init.main(InitOptions(url=lost.url, run="tiny"))


def test_an_empty_folder_cannot_continue_a_run(lost: LostRun, tmp_path: Path) -> None:
    with failing(ConfigError, "init.no-checkpoint"):
        init.main(InitOptions(url=lost.url, run="tiny", resume=str(tmp_path / "empty")))


@pytest.mark.parametrize("notices", ["pump_heartbeat", "pump_receive"])
def test_an_island_leaves_a_run_that_took_the_name(lost: LostRun, notices: str) -> None:
    other = replace(lost.manifest, uid="2" * 32)
    lost.transport.create(other, samples.first_snapshots(other, 2.0))
    if notices == "pump_receive":
        merger = Merger(lost.connect(), lost.run.clock)
        assert merger.acquire()
        merger.load()
    before = tiny.leaf_bytes(lost.island.inner)
    with failing(ConfigError, "island.other-run"):
        getattr(lost.island.link, notices)()
    lost.island.link.pump()
    with failing(ConfigError, "island.other-run"):
        lost.island.boundary()
    assert tiny.leaf_bytes(lost.island.inner) == before
    assert lost.transport.reader.books().published == 0


def test_a_damaged_uid_is_no_other_run(lost: LostRun) -> None:
    init.main(InitOptions(url=lost.url, run="tiny", resume=str(lost.folder.path)))
    lost.transport.connection.redis.hset("{tiny:s0}:manifest", "uid", "nonsense")
    lost.island.link.pump()
    assert lost.island.link.failure is None


# -- the accounts of tokens ------------------------------------------------------------------------------------------


def beat(lost: LostRun, island: Island) -> None:
    """Let an island describe itself as it is now, although it has done so a short time ago."""
    lost.run.clock.now += 1.0
    island.beat("training")


def accounts(lost: LostRun) -> RunView:
    """Return the run as it is seen, whose accounts must add up."""
    view = observe(lost.transport, lost.manifest)
    parts = view.tokens_merged + view.tokens_refused + view.tokens_pending + view.tokens_unsent + view.tokens_lost
    assert view.tokens_trained == parts
    return view


def test_tokens_that_were_merged_after_the_checkpoint_are_lost(lost: LostRun) -> None:
    init.main(InitOptions(url=lost.url, run="tiny", resume=str(lost.folder.path)))
    lost.serve()
    steps_back = lost.island.totals.steps - lost.run.merger.state.step
    lost.run.play(lost.island, 10)
    beat(lost, lost.island)
    lost.island.link.pump()
    view = accounts(lost)
    assert view.tokens_trained == lost.island.totals.tokens
    sent_again = KEPT_MIN * tiny.CONFIG.sync.interval / len(lost.manifest.fragments)
    assert view.tokens_lost > 0
    lost_steps = view.tokens_lost / tiny.CONFIG.tokens_per_step
    assert lost_steps <= steps_back - sent_again + 4, "the newest contributions are sent again"
    lost.island.leave("left", flush_seconds=0.0)
    lost.island.link.pump()
    lost.run.merger.turn(0.0)
    left = accounts(lost)
    assert (left.tokens_unsent, left.tokens_pending, left.tokens_lost) == (0, 0, view.tokens_lost)


def test_each_return_of_an_island_loses_what_it_had_not_sent(lost: LostRun) -> None:
    init.main(InitOptions(url=lost.url, run="tiny", resume=str(lost.folder.path)))
    lost.serve()
    lost.run.play(lost.island, 10)
    before, discarded = accounts(lost).tokens_lost, 0
    island = lost.island
    for number in range(7):
        island.advance()  # a step that it does not send, before it is killed
        beat(lost, island)
        island.link.pump()
        discarded += accounts(lost).tokens_unsent
        island = lost.run.island(incarnation=f"y{number}", silent=True)
        rejoin = Rejoin(lost.connect(), None, island, [])
        rejoin.ask(peers=False)
        rejoin.complete(None)
        island.beat("joining")
        island.link.pump()
        lost.run.play(island, 5)
    beat(lost, island)
    island.link.pump()
    view = accounts(lost)
    assert view.tokens_trained == island.totals.tokens
    assert view.tokens_lost - before == pytest.approx(discarded, abs=8)
    assert discarded > 0
