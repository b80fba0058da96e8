"""A corpus and a task for runs of a second or two, and a fixture that restores the state that commands change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import redis

from archipelago.broker.config import InnerConfig, MergeConfig, RunConfig, SyncConfig
from archipelago.broker.process import guarded
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.task import Task, TaskFile
from archipelago.islands.tasks.workload import Workload, task_config
from archipelago.ops.commands import run
from archipelago.ops.launch.embedded_redis import RedisServer
from tests.servers import empty_database

#: Runs a command. It returns its exit status, standard output and standard error.
Call = Callable[..., tuple[int, str, str]]


def prepare_small_text(folder: Path) -> None:
    """Prepare `small-text`, a corpus that models learn quickly, from a file in the folder."""
    source = folder / "text.txt"
    source.write_text("".join(f"{n} islands and {n * n % 997} ships\n" for n in range(6000)), encoding="utf-8")
    prepare_text(source, "small-text")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenCorpus:
    """Prepare `small-text`, also for processes that the test starts."""
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    prepare_small_text(tmp_path)
    return open_corpus("small-text")


def _init(seed: int) -> dict[str, jax.Array]:
    return {name: jnp.full((2, 3), 1.0 + seed) for name in "abcdef"}


def _loss(params: dict[str, jax.Array], batch_BxN: jax.Array) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.mean((each - jnp.mean(batch_BxN)) ** 2) for each in params.values()]))


def _batches(run: TaskRun) -> Iterator[jax.Array]:
    for shard in run.shards(8):
        yield from [jnp.full((2, 5), float(shard.number))] * (4 - shard.position)


@pytest.fixture(scope="session")
def small_task() -> Workload:
    """A task of six small tensors, each a fragment of its own. It is compiled once, and quickly."""
    file = TaskFile(Task(_init, _loss, _batches, evaluate=lambda params: 2.5), Path("/nowhere/mine.py"), "task")
    config = RunConfig(
        inner=InnerConfig(steps=480, warmup_steps=4),
        sync=SyncConfig(interval=12, fragments=6),
        merge=MergeConfig(embedding="average", rest="average"),
    )
    return Workload.of(file, task_config(config, file))


@pytest.fixture
def url(server: RedisServer) -> Iterator[str]:
    """Return the URL of a database without runs, on a real server."""
    with empty_database(server, 7) as url:
        yield url


@pytest.fixture
def raw(url: str) -> Iterator[Any]:
    """Return a plain Redis client of that database."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command. Return its exit status, standard output and standard error."""

    def made(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = guarded(lambda: run(args))
        except SystemExit as left:  # tyro raises it, for --help and for flags that it cannot parse.
            status = int(left.code or 0)
        return (status, *capsys.readouterr())

    return made
