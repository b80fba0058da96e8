"""Checkpoints of whole runs: a loaded image equals a saved one bit for bit, whatever happens to the disk."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from archipelago.broker.commits import Image
from archipelago.broker.config import OuterConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.full_state import PARAMETERS, FullState
from archipelago.broker.messages import Counters, Evaluation
from archipelago.merger import outer
from archipelago.merger.checkpoint import CheckpointStore, _save, describe
from tests import samples
from tests.failing import failing
from tests.samples import plain

EVALUATION = Evaluation(4, 312, 40_000, 1.75e9, 2.25)
COUNTERS = Counters(published=5, published_tokens=500, merged=2, merged_tokens=200, refused=1, refused_tokens=100)
ROOT = Path(__file__).parents[2]


def fragment(of: Image, p: int, version: int) -> Image:
    """Return the image with one fragment at this version. Equal arguments give equal images."""
    rng = np.random.default_rng([p, version])
    params_N, trace_N = rng.normal(size=(2, of.manifest.sizes[p])).astype(np.float32)
    changed = replace(
        of.fragments[p].snapshot,
        round=2 * version - 1 + p, version=version, step=4 * version, merged="a/x/0 b/y/1",
    )  # fmt: skip
    fragments = list(of.fragments)
    state = outer.build(OuterConfig(rule="nesterov")).init(params_N)
    state = jax.tree.map(lambda leaf: trace_N if leaf.ndim else leaf, state)
    fragments[p] = FullState(changed, params_N + np.float32(0.5), outer.named(params_N, state))
    return replace(of, fragments=tuple(fragments))


def image(number: int = 1, *versions: int) -> Image:
    """Return an image of two fragments at these versions, in which no field is empty."""
    manifest = samples.manifest()
    out = Image(
        manifest=manifest,
        number=number,
        fragments=samples.image(manifest, [], noise=b"").fragments,
        state=json.dumps({"closed": number, "of": "ünïcode \ud800"}),
        counters=COUNTERS,
        cursors={"3": (0, 7), "11": (2, 0)},
        tape=tuple(samples.commit([], round_number=t).tape for t in (1, 3)),
        evaluations=(EVALUATION, replace(EVALUATION, bits_per_byte=0.1 + 0.2)),
        pending=(samples.packed(np.arange(5, dtype=np.float32), round=2, data="s"), (samples.contribution(b""), b"")),
    )
    for p, version in enumerate(versions):
        out = fragment(out, p, version) if version else out
    return out


def bare(number: int = 1) -> Image:
    """Return the image of a run without rounds."""
    return replace(image(number), state="", counters=Counters(), cursors={}, tape=(), evaluations=(), pending=())


def saved(folder: Path, *images: Image, keep: int = 3) -> CheckpointStore:
    store = CheckpointStore(folder, keep)
    for each in images:
        store.save(each)
    return store


def directories(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- saving and loading ------------------------------------------------------------------------------------------------


def test_images_are_restored_bit_for_bit_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    missing = replace(image(5), evaluations=(replace(EVALUATION, bits_per_byte=float("nan")),))
    images = [image(1), bare(2), image(4, 3, 2), missing]
    store = saved(tmp_path / "a" / "b", *images, keep=4)
    assert store.numbers() == [1, 2, 4, 5]
    for what in images[:3]:
        assert plain(CheckpointStore(tmp_path / "a" / "b").load(what.number)) == plain(what)
    found = store.load()
    assert found is not None
    assert np.isnan(found.evaluations[0].bits_per_byte)
    assert (caplog.records, len(recwarn)) == ([], 0)
    assert all(part in describe([image(7, 3, 2)]) for part in ("7", "sample", "5", "12", "2"))


def test_plain_orbax_restores_named_tensors(tmp_path: Path) -> None:
    """Users can read a checkpoint without Archipelago."""
    import orbax.checkpoint as ocp

    what = image(7, 3, 2)
    saved(tmp_path, what)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 7
        items = ("parameters", "published", "outer")
        how: Any = {name: ocp.args.StandardRestore() for name in items}
        found = manager.restore(7, args=ocp.args.Composite(metadata=ocp.args.JsonRestore(), **how))
    tensors = {tensor.name: tensor.shape for tensor in what.manifest.tensors if tensor.size}
    for name in ("parameters", "published"):
        assert {key: value.shape for key, value in found[name].items()} == tensors
        assert {np.dtype(value.dtype) for value in found[name].values()} == {np.dtype(np.float32)}
    for rows, full in zip(what.manifest.layout, what.fragments, strict=True):
        params_N = full.own[PARAMETERS]
        for tensor, at in rows:
            expected = params_N[at : at + tensor.size].reshape(tensor.shape)
            assert np.array_equal(np.asarray(found["parameters"][tensor.name]), expected)
    assert sorted(found["outer"]) == ["0", "1"]
    assert found["metadata"]["fields"]["number"] == 7


def test_the_newest_are_kept_and_the_newest_of_all_is_loaded_by_default(tmp_path: Path) -> None:
    store = saved(tmp_path, image(3), image(7, 1), image(8, 1, 1), keep=2)
    assert (store.numbers(), directories(tmp_path), store.next_number()) == ([7, 8], ["7", "8"], 9)
    assert plain(store.load()) == plain(image(8, 1, 1))
    assert plain(store.load(7)) == plain(image(7, 1))
    store.held = lambda: [7]  # it is being copied
    store.save(image(9, 2, 1))
    store.save(image(10, 2, 2))
    assert store.numbers() == [7, 9, 10]
    for number in (7, 10):
        with failing(ConfigError, "checkpoint.write"):
            store.save(image(number, 1))
    for folder, number in ((tmp_path, 5), (tmp_path / "missing", 1)):
        with failing(ConfigError, "checkpoint.missing"):
            CheckpointStore(folder).load(number)
    with failing(ConfigError, "config.value"):
        CheckpointStore(tmp_path, keep=0)


def test_leftovers_of_a_death_are_removed_by_the_next_save(tmp_path: Path) -> None:
    store = saved(tmp_path, image(1))
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    assert store.numbers() == [1]
    store.save(image(3))
    assert directories(tmp_path) == ["1", "3"]


def test_saves_leave_nothing_in_memory(tmp_path: Path) -> None:
    """Orbax 0.12 with tensorstore up to 0.1.86 keeps five blocks for each array, unless its private API is changed."""
    items = {"parameters": {str(n): np.zeros(2, np.float32) for n in range(100)}}
    blocks = []
    for number in range(1, 13):
        _save(tmp_path, 3, [], number, items, {})
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    assert blocks[-1] - blocks[-6] < 1000  # five saves of a hundred arrays would keep 2,500


# -- a death at any file operation -------------------------------------------------------------------------------------

DEATHS = """
import os, signal, shutil, sys
from pathlib import Path
import orbax.checkpoint
import archipelago.merger.checkpoint
from tests.merger.test_checkpoint_store import CheckpointStore, image

CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree"}

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def at_failpoint(wanted):
    archipelago.merger.checkpoint.failpoint = lambda name: dies() if name == wanted else None

def at_change(left):
    def hook(event, args):
        nonlocal left
        if event in CHANGES or event == "open" and args[2] & os.O_CREAT:
            if left == 0:
                dies()
            left -= 1
    sys.addaudithook(hook)

def survives(base, name, prepare):
    shutil.copytree(base / "before", base / name)
    child = os.fork()
    if child == 0:
        prepare()
        CheckpointStore(base / name, keep=2).save(image(4, 2, 3))
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

base = Path(sys.argv[1])
for name in ("checkpoint.before", "checkpoint.done"):
    assert not survives(base, name, lambda: at_failpoint(name))
count = 1
while not survives(base, f"change {count}", lambda: at_change(count)):
    count += 5  # every fifth one
"""


@pytest.mark.full
def test_a_death_leaves_the_checkpoint_before_or_after(tmp_path: Path) -> None:
    saved(tmp_path / "before", image(2, 2, 1), image(3, 2, 2), keep=2)
    subprocess.run(
        [sys.executable, "-c", DEATHS, str(tmp_path)], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    folders = sorted(tmp_path.iterdir())
    assert len(folders) > 5
    after = {folder.name: plain(CheckpointStore(folder, keep=2).load()) == plain(image(4, 2, 3)) for folder in folders}
    assert (after["checkpoint.before"], after["checkpoint.done"]) == (False, True)
    for folder in folders:
        store = CheckpointStore(folder, keep=2)
        assert after[folder.name] or plain(store.load()) == plain(image(3, 2, 2))
        last = image(max(store.next_number(), 5), 9, 9)
        store.save(last)
        assert plain(store.load()) == plain(last)
        assert directories(folder) == sorted(map(str, store.numbers())), folder.name


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_damaged_or_not_its_own_is_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, image(1, 1, 1), image(2, 2, 2))
    shutil.rmtree(tmp_path / "2" / "parameters" / "d")
    assert plain(CheckpointStore(tmp_path).load()) == plain(image(1, 1, 1))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with failing(ConfigError, "checkpoint.unreadable"):
        CheckpointStore(tmp_path).load(2)
    shutil.rmtree(tmp_path / "2" / "parameters")
    shutil.copytree(tmp_path / "1" / "parameters", tmp_path / "2" / "parameters")
    assert plain(CheckpointStore(tmp_path).load()) == plain(image(1, 1, 1)), (
        "Orbax accepts these arrays, and their shapes fit"
    )
    shutil.rmtree(tmp_path / "2")
    (tmp_path / "1").rename(tmp_path / "4")
    with failing(ConfigError, "checkpoint.unreadable"):
        CheckpointStore(tmp_path).load()


# -- disks that fail ---------------------------------------------------------------------------------------------------


def test_a_missing_folder_and_one_that_is_a_file_hold_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("missing", "file"):
        store = CheckpointStore(tmp_path / name)
        assert (store.numbers(), store.next_number(), store.load()) == ([], 1, None)
    with failing(ConfigError, "checkpoint.write"):
        CheckpointStore(tmp_path / "file").save(image(1))
    assert directories(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
