"""A run is continued with its own settings or extended; `up` passes flags and devices to its workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import jax
import pytest

from archipelago.broker.buckets.copier import FINISH_SECONDS
from archipelago.broker.buckets.folder import BUCKET_VARIABLE
from archipelago.broker.config import InnerConfig, MergeConfig, ModelConfig, RunConfig, WireConfig
from archipelago.broker.control import STEPS, Control
from archipelago.broker.errors import ArchipelagoError, MismatchError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.process import RUN_VARIABLE
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Memory, Transport
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.mesh import MeshShape
from archipelago.merger.storage import MergerFolder
from archipelago.ops.chaos import main as chaos
from archipelago.ops.commands import parse
from archipelago.ops.launch import devices, local_run, up
from archipelago.ops.launch.devices import Accelerators, DeviceShares, accelerators, shared_out
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.launch.init import InitOptions, create, tell_of_memory
from archipelago.ops.launch.local_run import AWAY_SECONDS, DRAIN_SECONDS, KILL_SECONDS, LocalRun, leave_seconds
from archipelago.ops.launch.supervisor import LAST_LINES, Child
from archipelago.ops.launch.up import UpOptions
from archipelago.ops.settings import flags
from archipelago.ops.watch.reading import Watcher
from archipelago.ops.watch.state_line import StateLine
from tests import samples
from tests.failing import failing
from tests.small import SMALL

CONFIG = replace(SMALL, data=replace(SMALL.data, corpus="small-text"))


@pytest.fixture
def transport(corpus: OpenCorpus, tmp_path: Path) -> Iterator[Transport]:
    """Return a connection to the run `mine`, which exists."""
    made = connect(f"fakeredis://{tmp_path.name}", "mine")
    create(made, CONFIG)
    yield made
    made.close()


def test_a_part_that_does_not_fit_is_named(transport: Transport, capsys: pytest.CaptureFixture[str]) -> None:
    for limit, is_short in ((0, False), (1, True)):
        tell_of_memory(transport.reader.manifest(), Memory(0, limit))
        assert ("too little for Redis" in capsys.readouterr().err) is is_short


def continued(transport: Transport, config: RunConfig, folder: Path, file: Path | None = None) -> None:
    """Continue the run as `archipelago up` does."""
    kept = MergerFolder(folder / "mine" / "merger")
    manifest, created = up._find_or_create(transport, config, kept, UpOptions(run="mine", folder=folder, config=file))
    assert (manifest.config.inner.steps, created) == (CONFIG.inner.steps, False)


def test_other_settings_are_named_and_the_runs_own_go_on(transport: Transport, tmp_path: Path) -> None:
    with failing(MismatchError, "config.other-settings"):
        create(transport, replace(CONFIG, seed=7))
    with failing(MismatchError, "config.other-settings") as failure:
        continued(transport, replace(CONFIG, model=ModelConfig("small")), tmp_path)
    assert isinstance(failure.value, MismatchError)
    assert failure.value.subject == "model.size", "its learning rate follows from the model"
    other = replace(CONFIG, seed=7, inner=replace(CONFIG.inner, weight_decay=0.2))
    with failing(MismatchError, "config.other-settings") as failure:
        continued(transport, other, tmp_path)
    error = failure.value
    assert isinstance(error, MismatchError)
    assert (error.subject, error.run_value, error.worker_value) == ("seed, inner.weight_decay", "0, 0.1", "7, 0.2")
    continued(transport, CONFIG, tmp_path)


def test_a_larger_number_of_steps_extends_the_run(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lasting(steps: int, seed: int = 0) -> RunConfig:
        return replace(CONFIG, seed=seed, inner=replace(CONFIG.inner, steps=steps))

    own, default = CONFIG.inner.steps, RunConfig().inner.steps
    assert default > own + 100
    with failing(MismatchError, "config.other-settings"):
        continued(transport, lasting(9999, seed=1), tmp_path)
    continued(transport, lasting(default), tmp_path)
    assert transport.reader.control() == {}, "the flag was forgotten"
    transport.reader.steer({STEPS: str(own - 1)})
    continued(transport, lasting(default), tmp_path)
    assert transport.reader.control() == {STEPS: str(own - 1)}, "the run was steered to be shorter"
    for steps in (own + 100, own + 100, own):  # longer, the same again, and the run's own settings
        continued(transport, lasting(steps), tmp_path)
        assert transport.reader.control() == {STEPS: str(own + 100)}
    with failing(MismatchError, "config.other-settings"):
        continued(transport, lasting(own + 50), tmp_path)
    file = tmp_path / "settings.toml"
    file.write_text(f"[inner]\nsteps = {default}", encoding="utf-8")
    continued(transport, lasting(default), tmp_path, file)
    assert transport.reader.control() == {STEPS: str(default)}, "it is the default, and the file gives it"
    transport.reader.steer({STEPS: str(own + 100)})
    monkeypatch.setattr(sys, "argv", ["archipelago", "up", f"--inner.steps={default}"])
    continued(transport, lasting(default), tmp_path)
    assert transport.reader.control() == {STEPS: str(default)}


def test_up_tells_no_password(
    transport: Transport, server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up._greet(transport.reader.manifest(), False, server, server.url, tmp_path)
    said = capsys.readouterr().err
    assert f"archipelago island {tmp_path / 'admin.join'}" in said
    assert server.address.password not in said


def test_flags_give_the_config() -> None:
    for config in (
        RunConfig(),
        RunConfig(seed=3, record=True, model=ModelConfig("small"), inner=InnerConfig("muon", 9, 1e-5)),
        RunConfig(merge=MergeConfig(normalise=False, scores=False), wire=WireConfig(thin="")),
    ):
        assert parse(InitOptions, "archipelago init", flags(config)).settings == config


# -- workers of up ----------------------------------------------------------------------------------------------------


def session(folder: Path, *failed: str, is_fatal: bool = False) -> LocalRun:
    """Return a session of a merger and two islands, of which those named have failed."""
    children = [Child(name, [], {}, folder / f"{name}.log") for name in ("merger", "island-0", "island-1")]
    for child in children:
        child.log.write_text("".join(f"line {n}\n" for n in range(10)) + "error: the port is taken\n")
        if child.name in failed:
            child.failed, child.is_fatal = child.last_words(), is_fatal
    return cast(LocalRun, SimpleNamespace(merger=children[0], islands=children[1:], _others=list))


def test_a_process_that_cannot_continue_ends_up(tmp_path: Path) -> None:
    for failed, is_fatal in ((["merger"], False), (["island-1"], True), (["island-0", "island-1"], False)):
        with failing(ArchipelagoError, "up.worker-failed") as failure:
            LocalRun._require_workers(session(tmp_path, *failed, is_fatal=is_fatal))
        assert "the port is taken" in failure.value.what
        assert failure.value.remedy.count("\n") == LAST_LINES
    LocalRun._require_workers(session(tmp_path))
    LocalRun._require_workers(session(tmp_path, "island-0"))  # It has left its name to another process.


def test_up_starts_no_island_that_an_operator_has_asked_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, started = session_of(UpOptions(islands=2)), list[str]()
    made.folder = tmp_path
    view = SimpleNamespace(tokens_trained=0, unfinished=True, control=Control.of({"island.island-0": "expel"}))
    monkeypatch.setattr(LocalRun, "_observe", lambda _: view)
    monkeypatch.setattr(Child, "start", lambda self: started.append(self.name))
    monkeypatch.setattr(LocalRun, "_watch", lambda *_: None)
    monkeypatch.setattr(LocalRun, "_end", lambda _: None)
    assert not made.train()
    assert started == ["merger", "island-1"]
    assert "island-0 is not started: it was expelled by the operator" in capsys.readouterr().err


def test_up_goes_on_for_the_islands_of_others(tmp_path: Path) -> None:
    made = session_of(UpOptions(islands=1))
    seen = [SimpleNamespace(name=name, live=live) for name, live in (("island-0", True), ("joe", True), ("old", False))]
    made.watcher = cast(Watcher, SimpleNamespace(latest=None))
    assert made._others() == []
    for unfinished, others in ((True, ["joe"]), (False, [])):
        view = SimpleNamespace(unfinished=unfinished, islands=seen)
        made.watcher = cast(Watcher, SimpleNamespace(latest=SimpleNamespace(view=view)))
        assert made._others() == others
        made.islands[0].failed, made.islands[0].log = "error: no room", tmp_path / "log"
        with nullcontext() if others else failing(ArchipelagoError, "up.worker-failed"):
            made._require_workers()


def test_up_asks_for_the_islands_of_others_once_its_own_have_left(capsys: pytest.CaptureFixture[str]) -> None:
    made = session_of(UpOptions(islands=1))

    def sees(seconds: float, *live: str, unfinished: bool = True) -> None:
        view = SimpleNamespace(unfinished=unfinished, islands=[SimpleNamespace(name=name, live=True) for name in live])
        latest = SimpleNamespace(unix_seconds=time.time() + seconds, view=view)
        made.watcher = cast(Watcher, SimpleNamespace(latest=latest, now=time.time))

    sees(-1.0, "joe")
    assert made._goes_on(), "its own trains"
    made.islands[0].done = True
    for live in (("joe",), ()):
        sees(-1.0, *live)
        assert made._goes_on(), "nothing was seen since it has left"
    assert "serves" not in capsys.readouterr().err
    sees(1.0, "joe")
    assert made._goes_on()
    assert made._goes_on()
    assert capsys.readouterr().err.count("serves joe on") == 1
    for seconds, live, unfinished in ((2.0, (), True), (-1.0, ("joe",), False), (2.0, ("joe",), False)):
        sees(seconds, *live, unfinished=unfinished)
        assert not made._goes_on(), (seconds, live, unfinished)
    sees(1.0, "joe")
    made._left_at = made.watcher.latest.unix_seconds = time.time() - 2 * AWAY_SECONDS  # type: ignore[union-attr, misc]
    assert not made._goes_on(), "Redis is away"


def test_workers_have_the_time_to_copy_their_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BUCKET_VARIABLE, raising=False)
    usual, copying = (leave_seconds(WorkerOptions(bucket=bucket)) for bucket in (None, "s3://bucket/folder"))
    assert copying == usual + FINISH_SECONDS
    monkeypatch.setenv(BUCKET_VARIABLE, "s3://bucket/folder")
    assert leave_seconds(WorkerOptions()) == copying
    # First the islands end, and then the merger, before `up` ends itself.
    assert 2 * copying + DRAIN_SECONDS + KILL_SECONDS < up.END_SECONDS


def session_of(options: UpOptions, shares: DeviceShares | None = None) -> LocalRun:
    """Return a session of `up` that has started nothing."""
    manifest = samples.manifest()
    transport: Any = MemoryBroker().connect(manifest.run)
    watcher: Any = None  # nothing is watched before training
    return LocalRun(
        options, manifest, transport, watcher, "redis://h", Path("runs/demo"), lambda: False, None, {}, shares
    )


def test_each_worker_gets_the_same_flags() -> None:
    made = session_of(UpOptions(islands=2, log_json=True, tensorboard=False, spectra="gpu"))
    found = {child.name: list(child.argv) for child in (made.merger, *made.islands)}
    for given in found.values():
        assert {"--no-tensorboard", "--log-json"} <= set(given)
    assert [name for name, given in found.items() if "--spectra" in given and "gpu" in given] == ["merger"]


# -- devices of islands -----------------------------------------------------------------------------------------------


FOUR = Accelerators("cuda", ("0", "1", "2", "3"), "H100")
TPU = Accelerators("tpu", ("0", "1", "2", "3"), "TPU v4")


def test_each_island_gets_equally_many() -> None:
    assert accelerators({"JAX_PLATFORMS": "cpu"}) is None
    assert shared_out(None, 64, 3, mesh=MeshShape(data=8)) is None
    shares = shared_out(FOUR, 2)
    assert shares is not None
    assert [shares.environment(n)["CUDA_VISIBLE_DEVICES"] for n in range(2)] == ["0,1", "2,3"]
    assert len(shares.describe(["a", "b"])) == 2
    odd = shared_out(FOUR, 3)
    assert odd is not None
    assert odd.names == (("0",), ("1",), ("2",))
    assert len(odd.describe(["a", "b", "c"])) == 4, "the fourth is not used"


def test_islands_share_accelerators_only_if_they_may() -> None:
    with failing(code="up.devices"):
        shared_out(FOUR, 5)
    shares = shared_out(FOUR, 5, may_share=True)
    assert shares is not None
    assert shares.names == (("0",), ("1",), ("2",), ("3",), ("0",))


def test_processes_on_one_accelerator_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = shared_out(FOUR, 5, standbys=2, may_share=True)
    assert shares is not None
    # Islands 0 and 4 and standby 0 are on the first one, island 1 and standby 1 on the second.
    found = [shares.environment(number) for number in range(5)]
    assert [each["XLA_PYTHON_CLIENT_MEM_FRACTION"] for each in found] == ["0.300", "0.450", "0.900", "0.900", "0.300"]
    assert [each["XLA_PYTHON_CLIENT_PREALLOCATE"] for each in found] == ["false", "false", "true", "true", "false"]
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in shares.environment(0), "JAX refuses both names"


def test_up_without_a_terminal_leaves_out_the_problem_of_the_line_before(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([StateLine("training", "warn", share, about="run.few-syncs run") for share in (0.5, 0.5, 0.6)])
    known_each = list[str]()
    monkeypatch.setattr(local_run, "state_line", lambda *_: next(states))
    monkeypatch.setattr(local_run, "line", lambda *_, known: known_each.append(known))
    monkeypatch.setattr(local_run, "POLL_SECONDS", 0)
    running = Mock(redis=None, **{"stopped.side_effect": [False, False, False, True], "standbys.tend.return_value": []})
    LocalRun._watch(running, [])
    assert known_each == ["", "run.few-syncs run"]


def test_a_launcher_leaves_the_memory_of_an_accelerator_to_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the first parameters itself. JAX reads the variable when it first looks for devices."""
    seen, name = list[str | None](), "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setattr(jax, "devices", lambda: seen.append(os.environ.get(name)))
    for launcher in (up, chaos):
        monkeypatch.setattr(launcher, "trainable", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(up, "accelerators", lambda: None)
    monkeypatch.delenv(name, raising=False)
    starts: list[Callable[[], int]] = [lambda: up.main(UpOptions()), lambda: chaos.main(chaos.ChaosOptions())]
    for start in starts:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert (seen.pop(), seen, os.environ.get(name)) == ("false", [], None)
    monkeypatch.setenv(name, "true")
    devices.leave_to_children()
    assert (seen, os.environ[name]) == (["true"], "true"), "the user's word counts"


def test_up_computes_on_its_cores_where_its_islands_have_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has a chip alone, from when it first looks for devices."""
    set_, looked = dict[str, Any](), Mock()
    monkeypatch.setattr(jax.config, "update", set_.__setitem__)
    monkeypatch.setattr(jax, "devices", looked)
    monkeypatch.setattr(up, "trainable", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(up, "accelerators", lambda: TPU)
    with pytest.raises(KeyboardInterrupt):
        up.main(UpOptions(islands=1))
    assert set_ == {"jax_platforms": "cpu"}
    looked.assert_not_called()


def test_there_are_no_more_islands_than_accelerators_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, islands in ((None, 3), (Accelerators("cuda", ("0",), "H100"), 1), (FOUR, 3)):
        monkeypatch.setattr(up, "accelerators", lambda found=found: found)
        assert up._with_devices(UpOptions())[0].islands == islands
        assert up._with_devices(UpOptions(share_devices=True))[0].islands == 3


def test_spectra_on_a_gpu_take_a_tenth_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = UpOptions(islands=2, spectra="gpu")
    for found in (None, TPU, replace(FOUR, platform="rocm")):
        monkeypatch.setattr(up, "accelerators", lambda found=found: found)
        with failing(code="up.devices"):
            up._with_devices(wanted)
    monkeypatch.setattr(up, "accelerators", lambda: FOUR)
    shares = up._with_devices(wanted)[1]
    assert shares is not None
    assert shares.environment(0)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.800"


def test_chips_of_a_tpu_belong_to_one_process_and_a_mesh_must_fit_into_a_share() -> None:
    shares = shared_out(TPU, 2)
    assert shares is not None
    assert shares.environment(1) == {
        "TPU_VISIBLE_CHIPS": "2,3", "TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1"
    }  # fmt: skip
    with failing(code="up.devices"):
        shared_out(TPU, 5, may_share=True)
    with failing(code="up.devices"):
        shared_out(TPU, 2, standbys=1)
    assert shared_out(FOUR, 2, mesh=MeshShape(fsdp=2)) is not None
    with failing(code="mesh.size"):
        shared_out(FOUR, 2, mesh=MeshShape(fsdp=4))


def test_another_process_asks_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    answers: tuple[tuple[str, dict[str, str], tuple[str, ...] | None], ...] = (
        ('["cuda", 2, "H100"]', {}, ("0", "1")),
        ('["cuda", 2, "H100"]', {"CUDA_VISIBLE_DEVICES": "GPU-5, GPU-7"}, ("GPU-5", "GPU-7")),
        ('["cpu", 1, "cpu"]', {}, None),
        ("the driver is broken", {}, None),
    )
    for answer, environ, names in answers:
        done = SimpleNamespace(stdout=f"a warning\n{answer}\n")
        monkeypatch.setattr(subprocess, "run", lambda *given, done=done, **more: done)
        found = accelerators(environ)
        assert (found.names if found else None) == names, answer


@pytest.mark.full
def test_the_question_is_answered_in_a_real_process() -> None:
    """JAX finds a processor here, and the question must not fail before it says so."""
    asked = subprocess.run(
        [sys.executable, "-c", devices._QUESTION], capture_output=True, text=True, check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert asked.stdout.startswith('["cpu", ')


def test_islands_and_standbys_get_their_devices_and_their_mesh() -> None:
    session = session_of(UpOptions(islands=2, standbys=3, mesh="fsdp=2"), shared_out(FOUR, 2))
    shown = [child.environment.get("CUDA_VISIBLE_DEVICES") for child in (*session.islands, *session.standbys.all)]
    assert shown == ["0,1", "2,3", "0,1", "2,3", "0,1"]
    for child in (*session.islands, *session.standbys.all):
        assert child.argv[list(child.argv).index("--mesh") + 1] == "fsdp=2"
    assert "CUDA_VISIBLE_DEVICES" not in session.merger.environment
    assert session.merger.niceness > session.islands[0].niceness == session.standbys.all[0].niceness == 0
    on_processor = session_of(UpOptions(islands=2), None)
    assert on_processor.islands[0].niceness > on_processor.merger.niceness == 0


def test_a_new_run_has_the_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert InitOptions().run == UpOptions().run == "demo"
    monkeypatch.setenv(RUN_VARIABLE, "mine")
    assert InitOptions().run == UpOptions().run == "mine"
