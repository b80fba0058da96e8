"""The scripts of the guide, as they stand: two islands and a merger in real processes, one of them killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.messages import Heartbeat
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.weights.parameters import from_redis
from tests import pytorch
from tests.conftest import Until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
GUIDE = ROOT / "docs" / "guide" / "your-training.md"


def test_the_guide_shows_the_scripts_as_they_are() -> None:
    shown = dict(re.findall(r"<!-- (docs/examples/\S+) -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    assert {"docs/examples/train_jax.py", "docs/examples/train_torch.py"} <= set(shown)
    for name, text in shown.items():
        assert (ROOT / name).read_text() == text
        assert len(text.splitlines()) < (60 if "lora" in name else 40)


def test_the_guide_names_all_examples_and_they_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"docs/examples/{path.name}" in GUIDE.read_text()
        assert len(path.read_text().splitlines()) < 60


class Scripts:
    """Starts processes on one Redis, and ends them all."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "ARCHIPELAGO_URL": url, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        self.all: list[subprocess.Popen[str]] = []
        #: Those that end their children when they are terminated.
        self.with_children: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        said = self.folder / f"process-{len(self.all)}.log"
        with said.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=self.environment,
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.all.append(process)
        return process

    def said(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"process-{self.all.index(process)}.log").read_text()


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    with start_server(tmp_path / "redis") as server:
        started = Scripts(server.url, tmp_path)
        yield started
        for process in started.all:
            if process.poll() is None:
                process.terminate() if process in started.with_children else process.kill()
            process.wait()


def beat(url: str, island: str) -> Heartbeat | None:
    """Return the island's newest heartbeat."""
    try:
        transport = connect(url, "mine")
        try:
            beats = [presence.heartbeat for presence in transport.reader.presences()]
        finally:
            transport.close()
    except ArchipelagoError:
        return None
    return next((each for each in beats if each.island == island), None)


def loss_of(url: str, island: str) -> float:
    """Return the mean loss of the steps of the island's last contribution."""
    last = beat(url, island)
    assert last is not None
    return last.loss


def steer_steps(url: str, steps: int) -> None:
    """Set the length of the run, as `archipelago steer` does."""
    transport = connect(url, "mine")
    transport.reader.steer({"inner.steps": str(steps)})
    transport.close()


def last_step(url: str) -> int:
    """Return the run's step after its last round."""
    transport = connect(url, "mine")
    try:
        return transport.reader.tape(1)[-1].step
    finally:
        transport.close()


def end_of(said: str) -> int:
    """Return the step at which a script says that it ended. Without time to adopt the last rounds, it knows less."""
    found = re.search(r"ends at step (\d+)", said)
    assert found, said
    return int(found[1])


#: The script, its steps, the loss that it must reach (untrained models have 1.4 and 5.5), and the names of its tensors.
SCRIPTS = [
    ("train_jax.py", 20_000, 0.5, {"layers.0.kernel", "layers.0.bias", "layers.2.kernel", "layers.2.bias"}),
    ("train_torch.py", 6_000, 3.5, {"0.weight", "2.weight", "2.bias", "4.weight", "4.bias"}),
]
#: More examples with the packages that they need, and the names of their tensors.
MORE = [
    (
        "train_equinox.py",
        ["equinox", "sklearn"],
        {f"layers.{n}.{leaf}" for n in range(3) for leaf in ("weight", "bias")},
    ),
    (
        "train_grain.py",
        ["grain", "sklearn"],
        {f"params.layers_{n}.{leaf}" for n in (0, 2) for leaf in ("kernel", "bias")},
    ),
]


@pytest.mark.full
@pytest.mark.processes
def test_a_killed_process_of_fsdp_ends_its_island_and_the_island_rejoins(scripts: Scripts, until: Until) -> None:
    pytorch.required()
    url = scripts.environment["ARCHIPELAGO_URL"]
    script = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "train_fsdp.py"))
    oslo = scripts.start(*script, "oslo")
    scripts.with_children.append(oslo)
    until(lambda: beat(url, "oslo") or oslo.poll(), "the island to join")
    scripts.start("-m", "archipelago.ops", "merger", "--run", "mine")
    until(lambda: (found := beat(url, "oslo")) is not None and found.sent > 4, "its contributions")
    first = beat(url, "oslo")
    children = Path(f"/proc/{oslo.pid}/task/{oslo.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    oslo.wait()
    assert oslo.returncode != 0
    oslo = scripts.start(*script, "oslo")
    scripts.with_children.append(oslo)
    until(lambda: oslo.poll() is not None, "the run to end")
    assert oslo.returncode == 0, scripts.said(oslo)
    assert 1_000 <= end_of(scripts.said(oslo)) <= 1_200
    last = beat(url, "oslo")
    assert first is not None
    assert last is not None
    assert last.loss < 4.5
    assert last.incarnation != first.incarnation
    assert set(from_redis(url, "mine").params) == {"0.weight", "2.weight", "2.bias", "4.weight", "4.bias"}


#: The script, its steps, the loss that it must reach (untrained models have 5.5 and 1.8), and its trained and frozen
#: parameters.
LORA = [("lora_torch.py", 600, 3.0, 9_728, 115_008), ("lora_jax.py", 6_000, 0.5, 1_104, 5_376)]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("name", "steps", "loss", "trained", "frozen"), LORA)
def test_three_islands_train_and_send_only_adapters(
    name: str, steps: int, loss: float, trained: int, frozen: int, scripts: Scripts, until: Until
) -> None:
    for package in ("torch", "transformers", "peft") if name == "lora_torch.py" else ():
        pytorch.required(package)
    url = scripts.environment["ARCHIPELAGO_URL"]
    islands = {island: scripts.start(str(EXAMPLES / name), island) for island in ("oslo", "lima", "kyoto")}
    until(lambda: all(beat(url, island) for island in islands), "all islands to join")
    scripts.start("-m", "archipelago.ops", "merger", "--run", "mine")
    for island, process in islands.items():
        until(lambda process=process: process.poll() is not None, "the run to end")
        assert process.returncode == 0, scripts.said(process)
        assert 0 < end_of(scripts.said(process)) <= steps
        assert loss_of(url, island) < loss
    assert last_step(url) >= 0.9 * steps
    transport = connect(url, "mine")
    manifest, books = transport.reader.manifest(), transport.reader.books()
    transport.close()
    assert (manifest.parameters, manifest.frozen_parameters) == (trained, frozen)
    assert all("lora" in tensor.name for tensor in manifest.tensors)
    assert books.bytes_up < books.published * trained, "int4 and scales of about half of the adapters"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("name", "steps", "loss", "tensors"), SCRIPTS)
def test_a_killed_script_rejoins_and_the_run_ends(
    name: str, steps: int, loss: float, tensors: set[str], scripts: Scripts, until: Until
) -> None:
    if name == "train_torch.py":
        pytorch.required()
    script = str(EXAMPLES / name)
    url = scripts.environment["ARCHIPELAGO_URL"]
    oslo, lima = (scripts.start(script, island) for island in ("oslo", "lima"))
    until(lambda: all(beat(url, island) for island in ("oslo", "lima")), "both islands to join")
    steer_steps(url, 1_000 * steps)  # else one of them could end the run while the other one starts again
    scripts.start("-m", "archipelago.ops", "merger", "--run", "mine")

    def sent(island: str, incarnation: str = "") -> bool:
        found = beat(url, island)
        return found is not None and found.sent > 4 and found.incarnation != incarnation

    until(lambda: sent("oslo") and sent("lima"), "contributions of both islands")
    killed = beat(url, "lima")
    assert killed is not None
    lima.send_signal(signal.SIGKILL)
    lima.wait()
    lima = scripts.start(script, "lima")
    until(lambda: sent("lima", killed.incarnation), "contributions of the island that was started again")
    again = beat(url, "lima")
    assert again is not None
    assert again.moments == "peer oslo"
    assert again.steps > killed.steps // 2, "its totals go on"
    steps = max(steps, again.global_step + steps // 10)
    steer_steps(url, steps)
    for island, process in {"oslo": oslo, "lima": lima}.items():
        until(lambda process=process: process.poll() is not None, "the run to end")
        assert process.returncode == 0, scripts.said(process)
        assert 0 < end_of(scripts.said(process)) <= steps
        assert loss_of(url, island) < loss
    assert last_step(url) >= 0.9 * steps
    late = scripts.start(script, "late")
    until(lambda: late.poll() is not None, "a script to leave a run that has ended")
    assert late.returncode == 0, scripts.said(late)
    transport = connect(url, "mine")
    books = transport.reader.books()
    transport.close()
    assert books.merged > 100
    found = from_redis(url, "mine")
    assert set(found.params) == tensors


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("name", "packages", "tensors"), MORE)
def test_an_example_trains_to_the_end_of_its_run(
    name: str, packages: list[str], tensors: set[str], scripts: Scripts, until: Until
) -> None:
    for package in packages:
        pytorch.required(package)
    url = scripts.environment["ARCHIPELAGO_URL"]
    islands = {island: scripts.start(str(EXAMPLES / name), island) for island in ("oslo", "lima")}
    until(lambda: all(beat(url, island) for island in islands), "both islands to join")
    scripts.start("-m", "archipelago.ops", "merger", "--run", "mine")
    for island, process in islands.items():
        until(lambda process=process: process.poll() is not None, "the run to end")
        assert process.returncode == 0, scripts.said(process)
        assert "ends at step" in scripts.said(process)
        assert loss_of(url, island) < 0.5, "an untrained network has 2.3"
    assert set(from_redis(url, "mine").params) == tensors
