"""A Redis that has lost everything: the run continues from a checkpoint, and is not replaced without a word."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import refusal
from archipelago.islands.sync.connection.outbox import KEPT_MIN
from archipelago.islands.sync.leaving import leave
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.user_loop.new_run import require_no_islands
from archipelago.islands.worker import Island
from archipelago.merger.executor import at_once
from archipelago.merger.main import MergerOptions
from archipelago.merger.main import main as merger_main
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch import init
from archipelago.ops.launch.init import InitOptions
from archipelago.ops.watch.run_view import RunView
from tests import samples
from tests.broker.buckets.faulty_bucket import FaultyFileSystem
from tests.failing import failing
from tests.harness import tiny
from tests.harness.merger_run import take_checkpoint
from tests.harness.tiny import TinyRun


class LostRun(TinyRun):
    """A run with one island and a checkpoint, whose Redis then loses everything."""

    def __init__(self, folder: Path) -> None:
        self.url = f"fakeredis://{uuid.uuid4().hex}"
        self.folder = MergerFolder(folder)
        super().__init__(replace(tiny.manifest(), uid="1" * 32), self.open)
        self.merger.transport.merger.release(self.merger.epoch)
        self.serve()
        self.trained = self.island()
        self.play(self.trained, 12)
        take_checkpoint(self.merger)
        self.play(self.trained, 18)  # more rounds than the contributions that an island keeps after they were merged
        self.closed = self.merger.state.closed
        self.redis.connection.redis.flushall()
        self.trained.link.pump()  # it lives, and says so

    def open(self) -> RedisTransport:
        self.redis = connect(self.url, "tiny")
        return self.redis

    def serve(self) -> None:
        """Let a new merger serve the run."""
        checkpointer = self.folder.checkpointer(self.connect(), self.manifest, 1e9, at_once)
        self.merger = self.new_merger(checkpointer=checkpointer)

    def resume(self) -> None:
        """Continue the run from its checkpoint with a new merger."""
        self.folder.find_or_bring_back(self.redis, resume=True)
        self.serve()

    def options(self) -> InitOptions:
        return InitOptions(url=self.url, run="tiny")

    def describe(self, island: Island) -> None:
        """Let an island describe itself as it is now, although it has done so a short time ago."""
        self.clock.now += 1.0
        island.beat("training")
        island.link.pump()

    def accounts(self) -> RunView:
        """Return the run as it is seen, whose accounts of tokens must add up."""
        view = samples.view_of(self.redis)
        parts = view.tokens_merged + view.tokens_refused + view.tokens_pending + view.tokens_unsent + view.tokens_lost
        assert view.tokens_trained == parts
        return view


@pytest.fixture
def lost(tmp_path: Path) -> LostRun:
    return LostRun(tmp_path / "merger")


def test_a_checkpoint_in_the_bucket_is_named_and_a_bucket_that_is_away_does_not_hide_the_loss(
    lost: LostRun, tmp_path: Path, bucket: BucketFolder
) -> None:
    def away(request: str, path: str) -> None:
        raise ConnectionError("503")

    with pytest.raises(UnknownRunError) as raised:
        lost.merger.acquire()
    bucket.child("checkpoints").write("100.json", b"{}")
    here, other = MergerFolder(lost.folder.path, bucket=bucket), MergerFolder(tmp_path / "other", bucket=bucket)
    for folder in (here, other):
        found = folder.lost(raised.value, lost.redis)
        assert (found.code, f"checkpoint 100 in {bucket}." in found.remedy) == ("broker.resumable", True)
        assert found.remedy in refusal(lost.redis.reader)
    FaultyFileSystem.fault = staticmethod(away)
    for folder, code in ((here, "broker.resumable"), (other, "broker.lost")):
        found = folder.lost(raised.value, lost.redis)
        assert (found.code, f"{bucket} may hold" in found.remedy, "503" in found.remedy) == (code, True, True)
        assert found.remedy in refusal(lost.redis.reader)


def test_the_run_goes_on_from_the_checkpoint_with_its_islands(lost: LostRun, tmp_path: Path) -> None:
    with pytest.raises(UnknownRunError) as raised:
        lost.merger.acquire()
    nowhere = MergerFolder(tmp_path / "other").lost(raised.value, lost.redis)
    assert (nowhere.code, str(tmp_path / "other") in nowhere.remedy) == ("broker.lost", True)
    found = lost.folder.lost(raised.value, lost.redis)
    assert found.code == "broker.resumable"
    assert str(tmp_path / "merger") in found.remedy
    assert f"in {tmp_path / 'merger'}." in refusal(lost.redis.reader), "islands log it"
    with failing(UnknownRunError, "broker.unknown-run") as looked:
        lost.redis.reader.manifest()
    assert f"in {tmp_path / 'merger'}." in looked.value.remedy, "status and the page show it"

    step = lost.trained.ledger.global_step
    lost.resume()
    assert 0 < lost.merger.state.closed < lost.closed
    restored = lost.merger.state.step
    lost.play(lost.trained, 3)
    assert restored <= lost.trained.ledger.global_step < step, "its clock goes back, too, so the steps are made again"
    lost.play(lost.trained, 37)
    assert lost.merger.state.closed > lost.closed
    assert lost.redis.reader.uid() == lost.manifest.uid
    with failing(RunExistsError):
        lost.folder.bring_back(lost.redis)
    lost.redis.connection.redis.hset("{tiny:s0}:manifest", "uid", "nonsense")
    lost.trained.link.pump()
    assert lost.trained.link.pumps.failure is None, "a damaged uid is no other run"


def test_a_new_run_does_not_replace_living_islands(lost: LostRun) -> None:
    with failing(ConfigError, "init.islands-live"):
        init.main(lost.options())
    assert lost.redis.reader.runs() == []
    lost.redis.connection.redis.sadd(REGISTRY, "tiny")
    with failing(ConfigError, "init.islands-live"):  # nothing but the name is left
        init.main(lost.options())
    lost.trained.beat("left")
    lost.trained.link.pump()
    require_no_islands(lost.redis)


@pytest.mark.parametrize("notices", ["pump_heartbeat", "pump_receive"])
def test_an_island_leaves_a_run_that_took_the_name(lost: LostRun, notices: str) -> None:
    other = replace(lost.manifest, uid="2" * 32)
    lost.redis.create(other, samples.first_snapshots(other, 2.0))
    if notices == "pump_receive":
        merger = Merger(lost.connect(), lost.clock)
        assert merger.acquire()
        merger.load()
    before = tiny.leaf_bytes(lost.trained.inner)
    with failing(ConfigError, "island.other-run"):
        getattr(lost.trained.link, notices)()
    lost.trained.link.pump()
    with failing(ConfigError, "island.other-run"):
        lost.trained.boundary()
    assert tiny.leaf_bytes(lost.trained.inner) == before
    assert lost.redis.reader.counters().published == 0


def test_tokens_that_were_merged_after_the_checkpoint_are_lost(lost: LostRun) -> None:
    lost.resume()
    steps_back = lost.trained.totals.steps - lost.merger.state.step
    lost.play(lost.trained, 10)
    lost.describe(lost.trained)
    view = lost.accounts()
    assert view.tokens_trained == lost.trained.totals.tokens
    sent_again = KEPT_MIN * tiny.CONFIG.sync.interval / len(lost.manifest.fragments)
    assert view.tokens_lost > 0
    lost_steps = view.tokens_lost / tiny.CONFIG.tokens_per_step
    assert lost_steps <= steps_back - sent_again + 4, "the newest contributions are sent again"
    leave(lost.trained, "left", flush_seconds=0.0)
    lost.trained.link.pump()
    lost.merger.turn(0.0)
    left = lost.accounts()
    assert (left.tokens_unsent, left.tokens_pending, left.tokens_lost) == (0, 0, view.tokens_lost)


def test_each_return_of_an_island_loses_what_it_had_not_sent(lost: LostRun) -> None:
    lost.resume()
    lost.play(lost.trained, 10)
    before, discarded = lost.accounts().tokens_lost, 0
    island = lost.trained
    for number in range(7):
        island.advance()  # a step that it does not send, before it is killed
        lost.describe(island)
        discarded += lost.accounts().tokens_unsent
        island = lost.island(incarnation=f"y{number}", silent=True)
        rejoin = Newcomer(lost.connect(), island)
        rejoin.ask(wants_state=False)
        rejoin.complete()
        island.beat("joining")
        island.link.pump()
        lost.play(island, 5)
    lost.describe(island)
    view = lost.accounts()
    assert view.tokens_trained == island.totals.tokens
    assert view.tokens_lost - before == pytest.approx(discarded, abs=8)
    assert discarded > 0


def test_a_merger_does_not_serve_a_new_run_of_the_same_name(lost: LostRun) -> None:
    lost.trained.beat("left")
    lost.trained.link.pump()
    other = replace(lost.manifest, uid="2" * 32)
    lost.redis.create(other, samples.first_snapshots(other, 2.0))
    kept = lost.folder.store.numbers()
    options = MergerOptions(url=lost.url, run="tiny", folder=lost.folder.path)
    with failing(UnknownRunError, "broker.other-run") as refused:
        merger_main(options)
    assert "--resume" in refused.value.remedy and "merger away" in refused.value.remedy
    assert lost.folder.store.numbers() == kept and lost.redis.reader.uid() == other.uid
    assert "earlier run 'tiny'" in refusal(lost.redis.reader), "islands and `create` say why nobody serves them"

    assert lost.folder.find_or_bring_back(lost.redis, resume=True) == lost.manifest
    assert lost.redis.reader.uid() == lost.manifest.uid
    lost.serve()
    lost.merger.acquire()
    assert not refusal(lost.redis.reader)
    assert lost.folder.find_or_bring_back(lost.redis, resume=False) == lost.manifest


def test_resume_replaces_no_run_with_other_tensors_or_merged_work(lost: LostRun, tmp_path: Path) -> None:
    renamed = [tensor._replace(name=f"{tensor.name}x") for tensor in lost.manifest.tensors]
    names = tuple(tuple(f"{name}x" for name in fragment) for fragment in lost.manifest.fragments)
    other = replace(lost.manifest, uid="2" * 32, tensors=tuple(renamed), fragments=names)
    lost.redis.create(other, samples.first_snapshots(other, 2.0))
    with failing(UnknownRunError, "broker.other-run"):
        lost.folder.find_or_bring_back(lost.redis, resume=True)
    assert lost.redis.reader.uid() == other.uid

    lost.redis.connection.redis.flushall()
    lost.manifest = replace(lost.manifest, uid="3" * 32)
    lost.redis.create(lost.manifest, samples.first_snapshots(lost.manifest, 2.0))
    lost.merger = lost.new_merger()
    lost.play(lost.island("lima"), 12)
    assert lost.redis.reader.counters().merged > 0
    with failing(UnknownRunError, "broker.other-run") as refused:
        lost.folder.find_or_bring_back(lost.redis, resume=True)
    assert "merged in the new one" in refused.value.what
    assert lost.redis.reader.uid() == lost.manifest.uid


def test_resume_deletes_no_run_for_the_checkpoints_of_one_with_another_name(lost: LostRun) -> None:
    mine = connect(f"fakeredis://{uuid.uuid4().hex}", "mine")
    manifest = replace(lost.manifest, run="mine", uid="2" * 32)
    mine.create(manifest, samples.first_snapshots(manifest, 2.0))
    for resume in (False, True):
        with failing(UnknownRunError, "broker.other-run") as refused:
            lost.folder.find_or_bring_back(mine, resume=resume)
        assert "run 'tiny', not of 'mine'" in refused.value.what
        assert mine.reader.uid() == manifest.uid
