"""Standbys: their assignments, their silence before one, and the use of a prepared island only where it fits."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.logs import Origin
from archipelago.broker.process import Patience
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands import main, running
from archipelago.islands import prepared as preparing
from archipelago.islands.checkpoint import FILE
from archipelago.islands.main import Assignment, assignment
from archipelago.islands.models import registry
from archipelago.islands.models.transformer import transformer
from archipelago.islands.prepared import PreparedIsland
from archipelago.islands.tasks import ours
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import first_snapshots, our_work
from archipelago.islands.worker import Island
from tests.failing import failing
from tests.islands.models import mini
from tests.islands.test_main import CORPUS
from tests.small import SMALL
from tests.tiers import examples

#: A run of one fragment of a small model, because each fragment compiles its own programs.
LIGHT = replace(SMALL, model=ModelConfig("mini"), sync=replace(SMALL.sync, fragments=1))
AT_ONCE = Patience(0.0, lambda: False)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


# -- assignments -----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(st.lists(TEXTS), st.dictionaries(TEXTS.filter(lambda name: name and "=" not in name), TEXTS), TEXTS)
def test_an_assignment_is_one_line(arguments: list[str], environment: dict[str, str], log: str) -> None:
    written = Assignment(tuple(arguments), environment, log)
    assert written.line().count(b"\n") == 1
    assert assignment(written.line()) == written


LINES = [
    b"", b"\xff\n", b"oslo\n", b"[]\n", b"{}\n", b'{"arguments": "--name"}', b'{"arguments": [1]}',
    b'{"arguments": [], "environment": {"A": 1}}', b'{"arguments": [], "log": 7}',
]  # fmt: skip


def test_any_other_line_is_refused() -> None:
    for line in LINES:
        with failing(ConfigError, "standby.assignment"):
            pytest.fail(f"{line[:80]!r} was read as {assignment(line)}")


# -- prepared islands -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Train a small model on a text in memory. This process keeps its signal handlers, its allocator and its caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.MODELS, "mini", registry.NamedModel(partial(transformer, mini.SIZE)))
        patch.setattr("archipelago.islands.options.keep_compiled", lambda: None)
        patch.setattr(ours, "open_corpus", lambda *_: CORPUS)
        patch.setattr(main, "stop_on_signals", lambda: lambda: False)
        yield


@dataclass(frozen=True)
class Stored:
    """A run on a server of its own."""

    url: str
    transport: RedisTransport
    manifest: Manifest

    def held(self) -> dict[bytes, object]:
        """Return everything that the server holds."""
        redis = self.transport.connection.redis
        return {key: redis.dump(key) for key in redis.scan_iter()}


def created(config: RunConfig = LIGHT) -> Stored:
    url = f"fakeredis://{uuid.uuid4().hex}"
    transport, work = connect(url, "demo"), our_work(config, CORPUS)
    manifest = work.describe("demo")
    transport.create(manifest, first_snapshots(manifest, work.model.init()))
    return Stored(url, transport, manifest)


@pytest.fixture(scope="module")
def stored() -> Stored:
    return created()


@pytest.fixture(scope="module")
def prepared(stored: Stored) -> PreparedIsland:
    """Return a prepared island of the run, which has not rehearsed yet."""
    return preparing.prepare(stored.manifest)


def test_an_island_may_have_batches_of_its_own_size(stored: Stored) -> None:
    manifest = stored.manifest
    run_size = manifest.config.data.batch_size
    prepared = preparing.prepare(manifest, batch_size=3 * run_size)
    sample = prepared.workload.supply(TaskRun("a", 0)).sample(2)
    assert sample.shape[:2] == (2, 3 * run_size)
    assert prepared.fits(manifest, batch_size=3 * run_size)
    assert not prepared.fits(manifest)
    for wrong in (-1, 64 * run_size + 1):
        with failing(ConfigError, "config.value"):
            preparing.require_batch(wrong, manifest)
    with failing(ConfigError, "config.value"):
        preparing.require_batch(8, replace(manifest, task="mine"))


def run(
    stored: Stored,
    prepared: PreparedIsland | None,
    folder: Path | None,
    name: str | None = None,
) -> Island:
    """Build an island that leaves before its first step, and return it."""
    options = main.IslandOptions(url=stored.url, run="demo", folder=folder, name=name)
    worker = running.WorkerRun(options, "oslo", lambda: True, Origin("oslo"), prepared)
    assert worker.train() == "left"
    return worker.worker


@pytest.mark.full
def test_a_rehearsal_writes_nothing_and_its_island_uses_the_prepared_programs(
    prepared: PreparedIsland, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored.held()
    prepared.rehearse(stored.transport, AT_ONCE)
    assert [key for key, held in stored.held().items() if before.get(key) != held] == []
    assert stored.transport.reader.presences() == []
    monkeypatch.setattr(preparing, "prepare", pytest.fail)
    island = run(stored, prepared, tmp_path)
    assert island.name == "oslo"
    assert island.computation.steps is prepared.workload.steps


def test_an_island_keeps_a_state_only_where_a_later_start_finds_it(
    prepared: PreparedIsland, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random name never comes back."""
    monkeypatch.chdir(tmp_path)
    for name, folder, kept in (
        (None, None, []),
        (None, Path("own"), [Path("own")]),
        ("oslo", None, [Path("own"), Path("runs/demo/islands/oslo")]),
    ):
        run(stored, prepared, folder, name=name)
        assert sorted(path.parent for path in Path().rglob(FILE)) == kept
        assert Path("runs").exists() == (name is not None), "nothing else stays, either"


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """A function that sets what this process reads from its standard input."""

    def reads(line: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(line)))

    return reads


def test_an_assignment_keeps_the_arguments_of_the_standby(
    prepared: PreparedIsland,
    stored: Stored,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    standard_input: Callable[[bytes], None],
) -> None:
    """The supervisor need not repeat the URL, for example."""
    became: list[main.IslandOptions] = []
    options = main.IslandOptions(url=stored.url, run="demo", evaluate_every=20.0, tensorboard=False, standby=True)
    monkeypatch.setattr(preparing, "prepared_for", lambda *_: prepared)  # whose programs are compiled
    monkeypatch.setattr(main, "run_island", lambda options, stopped, prepared: became.append(options))
    told = Assignment(("--name", "oslo", "--folder", str(tmp_path), "--evaluate-every", "30"))
    standard_input(told.line() + b"later bytes are not read")
    main.stand_by(options)
    assert capfd.readouterr().out == "ready\n"
    assert became == [replace(options, name="oslo", folder=tmp_path, evaluate_every=30.0, standby=False)]


def test_a_standby_ends_with_its_input(
    prepared: PreparedIsland,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    standard_input: Callable[[bytes], None],
) -> None:
    monkeypatch.setattr(main, "prepared_here", lambda _: prepared)
    for begun in (b"", b'{"arguments": ["--name"'):
        standard_input(begun)
        assert main.stand_by(main.IslandOptions(url=stored.url, run="demo", standby=True)) == 0
