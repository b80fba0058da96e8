"""What an island keeps for its own return: all of it or none, and only of its own run."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from broker.config import DataConfig, InnerConfig, RunConfig
from broker.errors import DataError
from broker.manifest import Corpus, Manifest, Tensor
from broker.memory import MemoryBroker
from broker.messages import Snapshot
from broker.wire import digest, pack
from islands import checkpoint
from islands.batches import Batches
from islands.inner import compile_steps
from islands.link import Link
from islands.model import Model, Params
from islands.worker import Island

CONFIG = RunConfig(
    data=DataConfig(sequence_length=4, batch_size=2, shards=4),
    inner=InnerConfig(steps=1000, learning_rate=0.01, warmup_steps=0),
)
TENSORS = (Tensor("kernel", (2, 3)), Tensor("scale", (5,)))
TEXT = np.random.default_rng(0).integers(0, 256, 512, np.uint8)


def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
    """A bowl whose middle depends on the text."""
    middle = jnp.mean(tokens_BxT1.astype(jnp.float32)) / 100.0
    return jnp.sum((params["kernel"] - middle) ** 2) + jnp.sum((params["scale"] - middle) ** 2)


def no_logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
    raise NotImplementedError


STEPS = compile_steps(Model(lambda seed: {}, loss, TENSORS, no_logits), CONFIG.inner)


def manifest(run: str = "tiny", tensors: tuple[Tensor, ...] = TENSORS) -> Manifest:
    return Manifest(run, CONFIG, tensors, tuple((t.name,) for t in tensors), Corpus("text", "0" * 32, 512), {})


def island(of: Manifest | None = None, text: np.ndarray[tuple[int], np.dtype[np.uint8]] = TEXT) -> Island:
    """One that has just joined a run of its own."""
    of = of or manifest()
    snapshots = []
    for p, size in enumerate(of.sizes):
        payload = pack(np.ones(size, np.float32), "float32", 1)
        snapshots.append((Snapshot(0, p, 0, 0, "float32", len(payload), digest(payload), ""), payload))
    transport = MemoryBroker().connect(of.run)
    transport.create(of, snapshots)
    link = Link(transport, of)
    return Island("a", of, STEPS, Batches(text, CONFIG, link.claim), link, link.join(), incarnation="x")


def trained(steps: int) -> Island:
    one = island()
    for _ in range(steps):
        one.advance()
    return one


def optimizer_bytes(of: Island) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(of.inner.optimizer)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Island]:
    """A folder with the state of an island after 7 steps; copy it before changing it."""
    folder = tmp_path_factory.mktemp("island") / "kept"
    one = trained(7)
    checkpoint.save(folder, one)
    return folder, one


@pytest.fixture
def copied(kept: tuple[Path, Island], tmp_path: Path) -> Path:
    return shutil.copytree(kept[0], tmp_path / "copied")


def test_moments_place_and_totals_come_back_to_the_bit(kept: tuple[Path, Island]) -> None:
    folder, before = kept
    after = island()
    assert optimizer_bytes(after) != optimizer_bytes(before)
    assert checkpoint.restore(folder, after)
    assert optimizer_bytes(after) == optimizer_bytes(before)
    assert str(jax.tree.structure(after.inner.optimizer)) == str(jax.tree.structure(before.inner.optimizer))
    assert after.batches.state() == before.batches.state()
    assert after.totals == before.totals
    assert after.totals.steps == 7
    assert after.batches.next(3).tobytes() == before.batches.next(3).tobytes()


def test_parameters_and_clock_come_from_the_merger(kept: tuple[Path, Island]) -> None:
    folder, before = kept
    after = island()
    assert checkpoint.restore(folder, after)
    assert after.inner.params["kernel"].tolist() == [[1.0] * 3] * 2
    assert before.inner.params["kernel"].tolist() != [[1.0] * 3] * 2
    assert after.ledger.global_step == 0


def test_training_goes_on_with_what_was_restored(kept: tuple[Path, Island]) -> None:
    folder, _ = kept
    before, after = trained(7), island()
    assert checkpoint.restore(folder, after)
    after.inner = after.inner._replace(params=jax.tree.map(jnp.array, before.inner.params))
    after.ledger.global_step = before.ledger.global_step
    for one in (before, after):
        one.advance()
    for name, value in before.inner.params.items():
        assert np.asarray(after.inner.params[name]).tobytes() == np.asarray(value).tobytes()


def test_where_nothing_was_kept_nothing_is_restored(tmp_path: Path) -> None:
    fresh = island()
    before = optimizer_bytes(fresh)
    assert not checkpoint.restore(tmp_path / "missing", fresh)
    assert not (tmp_path / "missing").exists()
    (tmp_path / "empty").mkdir()
    assert not checkpoint.restore(tmp_path / "empty", fresh)
    assert optimizer_bytes(fresh) == before


@pytest.mark.parametrize(
    "other",
    [manifest("another"), manifest(tensors=(*TENSORS, Tensor("more", (2,)))), manifest(tensors=TENSORS[::-1])],
    ids=["another name", "another tree", "another order"],
)
def test_another_runs_state_is_left_alone(kept: tuple[Path, Island], other: Manifest) -> None:
    fresh = island(other)
    before = optimizer_bytes(fresh)
    assert not checkpoint.restore(kept[0], fresh)
    assert optimizer_bytes(fresh) == before
    assert fresh.totals.steps == 0


def test_a_place_in_another_text_is_an_error(kept: tuple[Path, Island]) -> None:
    with pytest.raises(DataError, match="saved place"):
        checkpoint.restore(kept[0], island(text=TEXT[:64]))


@pytest.mark.parametrize("steps", [9, 7, 3], ids=["later", "the same step", "earlier"])
def test_the_state_that_was_saved_last_is_restored(copied: Path, steps: int) -> None:
    """An island may leave at a global step at which it left before, or before that: it returns to the merger's."""
    last = trained(steps)
    last.batches.next(1)  # to tell it from the first
    checkpoint.save(copied, last)
    after = island()
    assert checkpoint.restore(copied, after)
    assert after.batches.state() == last.batches.state()
    assert optimizer_bytes(after) == optimizer_bytes(last)


def test_two_are_kept(copied: Path) -> None:
    for steps in (8, 9, 10):
        checkpoint.save(copied, trained(steps))
    assert len([path for path in copied.iterdir() if path.is_dir()]) == 2


def _tear(folder: Path, newest: Path) -> None:
    """As if the process had died while it wrote: under a name that says so, with a part of the files."""
    torn = folder / f"{int(newest.name) + 1}.orbax-checkpoint-tmp-1"
    shutil.copytree(newest, torn)
    for path in torn.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_what_was_half_written_is_never_read(copied: Path, kept: tuple[Path, Island]) -> None:
    (newest,) = [path for path in copied.iterdir() if path.is_dir()]
    _tear(copied, newest)
    after = island()
    assert checkpoint.restore(copied, after)
    assert optimizer_bytes(after) == optimizer_bytes(kept[1])


def test_only_half_written_is_nothing(copied: Path) -> None:
    (newest,) = [path for path in copied.iterdir() if path.is_dir()]
    _tear(copied, newest)
    shutil.rmtree(newest)
    assert not checkpoint.restore(copied, island())


def test_a_death_at_any_rename_leaves_the_state_before_or_after(
    copied: Path, kept: tuple[Path, Island], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written becomes visible by renames: at whichever one the process dies, what is there is whole."""

    class Died(BaseException):
        pass

    last = trained(9)
    rename, left, deaths = os.rename, 0, 0

    def dies(source: str, target: str) -> None:
        nonlocal left, deaths
        if left == 0:
            deaths += 1
            raise Died
        left -= 1
        rename(source, target)

    found: list[list[bytes]] = []
    while len(found) < 20 and found[-1:] != [optimizer_bytes(last)]:
        with monkeypatch.context() as patched, contextlib.suppress(Died):
            left = len(found)
            patched.setattr(os, "rename", dies)
            checkpoint.save(copied, last)
        after = island()
        assert checkpoint.restore(copied, after)
        found.append(optimizer_bytes(after))
    assert found == [optimizer_bytes(kept[1])] * deaths + [optimizer_bytes(last)]
    assert deaths >= 1


def test_an_island_of_another_config_still_has_its_tree(copied: Path) -> None:
    of = manifest()
    warmer = replace(of, config=replace(CONFIG, inner=replace(CONFIG.inner, learning_rate=0.02)))
    assert checkpoint.restore(copied, island(warmer))
