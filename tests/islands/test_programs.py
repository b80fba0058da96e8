"""Programs that outlive their process: the same bits, nothing made twice, and no harm from what is not as expected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from archipelago.broker.config import InnerConfig, ModelConfig
from archipelago.islands import programs as programs_module
from archipelago.islands.creation import outline
from archipelago.islands.inner import InnerSteps, begin, compile_steps
from archipelago.islands.models.registry import build
from archipelago.islands.programs import Programs, copied

pytestmark = pytest.mark.skipif(not programs_module._cpu(), reason="this system does not say what its processor is")


def never() -> Any:
    raise AssertionError("it was made again")


def double(x_N: jax.Array) -> jax.Array:
    return 2 * x_N


def kept(folder: Path | None, make: Callable[[], Any] = never, made_of: str = "double") -> Callable[[Any], Any]:
    return Programs(folder).keep(make, made_of, lambda x_N: 0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.program"))


ONES = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("size", "optimizer", "clock"),
    [
        ("tiny", "adamw", "global"),
        ("tiny", "muon", "local"),
        ("tiny-moe", "adamw", "local"),
        ("digits", "muon", "global"),
    ],
)
def test_inner_steps_of_a_kept_program_have_the_bits_of_the_jitted_function(
    tmp_path: Path, size: Any, optimizer: Any, clock: Any
) -> None:
    """By a local clock the step's number is not used, and JAX would leave it out of the program."""
    of = ModelConfig(size=size)
    config = InnerConfig(optimizer=optimizer, clock=clock, steps=10, warmup_steps=2)
    model = build(of)
    jitted = compile_steps(model, config)

    def keep(make: Callable[[], InnerSteps]) -> InnerSteps:
        return Programs(tmp_path).keep(make, (of, config), lambda state, tokens, step: (state, 0), donate=(0,))

    def trained(steps: InnerSteps) -> list[bytes]:
        state, losses = begin(config, model.init(0)), []
        for number in range(3):
            shape = (1, 2, model.example_bytes or 17)
            tokens_nxBxT1 = np.random.default_rng(number).integers(0, 10, shape, np.uint8)
            before = state
            state, losses_n = steps(state, jax.device_put(tokens_nxBxT1), jax.device_put(np.int32(number)))
            losses.append(losses_n)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params)), "a step donates what goes in"
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, losses))]

    expected = trained(jitted)
    assert trained(keep(lambda: jitted)) == expected
    assert [path.stat().st_size > 1000 for path in files(tmp_path)] == [True]
    assert trained(keep(never)) == expected


def test_who_asks_twice_gets_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an island does that a standby rehearsed."""
    programs = Programs(tmp_path)

    def keep(made_of: object, donate: tuple[int, ...] = ()) -> Callable[[Any], Any]:
        return programs.keep(lambda: jax.jit(double, donate_argnums=donate), made_of, lambda x_N: 0, donate)

    first = keep("double")
    assert first(ONES).tolist() == [2.0, 2.0, 2.0]
    monkeypatch.setattr(Programs, "read", never)
    assert keep("double")(ONES).tolist() == [2.0, 2.0, 2.0]
    assert keep("double") is first
    assert first not in (keep("other"), keep("double", donate=(0,)))


def test_what_is_damaged_is_made_as_ever(tmp_path: Path) -> None:
    kept(tmp_path, lambda: jax.jit(double))(ONES)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-9], whole[: len(whole) // 2] + b"\xff" + whole[len(whole) // 2 + 1 :], b"\0" * 99):
        path.write_bytes(damaged)
        assert kept(tmp_path, lambda: jax.jit(double))(ONES).tolist() == [2.0] * 3
        assert kept(tmp_path)(ONES).tolist() == [2.0] * 3, "it is kept again"


def test_a_program_that_cannot_run_here_uses_nothing_up_and_is_not_tried_again(tmp_path: Path) -> None:
    def both(x_N: jax.Array, y_N: jax.Array) -> jax.Array:
        return x_N + y_N

    def make() -> Callable[[Any, Any], Any]:
        return jax.jit(both)

    Programs(tmp_path).keep(make, "both", lambda x_N, y_N: 0)(ONES, ONES)
    (wrong,) = files(tmp_path)
    kept(tmp_path, lambda: jax.jit(double))(ONES)
    (path,) = set(files(tmp_path)) - {wrong}
    path.write_bytes(wrong.read_bytes())
    for _ in range(2):
        assert kept(tmp_path, lambda: jax.jit(double))(ONES).tolist() == [2.0] * 3
        assert Programs(tmp_path).read(path.name) == b""


def test_what_comes_back_as_other_numbers_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module._Executable, "__call__", lambda self, leaves: jax.device_put(leaves[0]))
    assert kept(tmp_path, lambda: jax.jit(double))(ONES).tolist() == [2.0] * 3
    assert [Programs(tmp_path).read(path.name) for path in files(tmp_path)] == [b""]


def test_other_shapes_settings_flags_and_sources_are_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return jax.jit(double)

    def count() -> int:
        return len(files(tmp_path))

    one = kept(tmp_path, make)
    assert [one(ONES[:n]).tolist() for n in (3, 2, 3)] == [[2.0] * 3, [2.0] * 2, [2.0] * 3]
    assert count() == 2
    assert one(ONES.astype(np.int32)).dtype == np.int32
    assert count() == 3
    kept(tmp_path, make, "something else")(ONES)
    assert count() == 4
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} ")
    kept(tmp_path, make)(ONES)
    assert count() == 5
    monkeypatch.setattr(programs_module, "_sources", lambda: "edited")
    kept(tmp_path, make)(ONES)
    assert count() == 6
    monkeypatch.setattr(programs_module, "_cpu", lambda: ["another"])
    kept(tmp_path, make)(ONES)
    assert count() == 7


def test_where_nothing_can_be_written_nothing_is_compiled_for_keeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs_module._Kept, "_new", lambda *_: never())
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", None):
        assert kept(folder, lambda: jax.jit(double))(ONES).tolist() == [2.0] * 3


def test_the_oldest_of_too_many_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "FILES_MAX", 3)
    programs = Programs(tmp_path)
    for number in range(5):
        assert programs.write(f"{number}", b"x")
        os.utime(tmp_path / f"{number}", (number, number))
    assert programs.read("2") == b"x"  # which makes it the newest
    assert programs.write("5", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]


def test_a_model_that_was_noted_is_described_without_being_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("tiny", "digits"):
        config = ModelConfig(size=size)
        found = outline(config)
        assert outline(config, Programs(tmp_path)) == found
        monkeypatch.setattr("archipelago.islands.models.registry.build", lambda config: never())
        assert outline(config, Programs(tmp_path)) == found
        monkeypatch.undo()
        with pytest.raises(AssertionError, match="made again"):
            monkeypatch.setattr("archipelago.islands.models.registry.build", lambda config: never())
            outline(replace(config, vocabulary=300), Programs(tmp_path))
        monkeypatch.undo()


def test_a_copy_is_another_array() -> None:
    """Whoever keeps one must not lose it to a step that donates the other, nor share the host's memory."""
    for _ in range(32):  # where the host's memory begins decides whether a processor goes on reading there
        host = np.ones(1 << 12, np.float32)
        first = copied({"x": host})
        second = copied(first)
        host[:] = 5.0
        assert first["x"][0] == 1.0
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(first)
        assert first["x"].is_deleted()
        assert second["x"][0] == 1.0


def test_a_start_loads_nothing_that_it_can_do_without() -> None:
    """What these take to import is most of a second of each start."""
    late = {"flax", "orbax", "tokenizers", "tensorboardX", "wandb", "matplotlib", "fakeredis", "prometheus_client"}
    names = "batches, checkpoint, rejoin, creation, device, inner, link, main, programs, telemetry, worker"
    code = f"import sys; from islands import {names}; print(*({late} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
