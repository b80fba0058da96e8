"""Scripts of the guide, as they stand, in real processes. `ops/chaos/test_storm_command.py` kills one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.presence import Heartbeat
from archipelago.broker.redis.transport import connect
from archipelago.islands.turn_log import STEP_VARIABLE
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.weights.export import find
from tests import pytorch
from tests.conftest import Until
from tests.harness.forks import Forks
from tests.harness.processes import SETTINGS, Processes
from tests.islands.user_loop.any_framework import served
from tests.servers import empty_database

#: Quick steps, of which a script makes few more than the test needs.
PACE = {STEP_VARIABLE: "0.01"}
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
GUIDE = ROOT / "docs" / "guide"


def test_the_guide_shows_the_scripts_as_they_are_and_names_all_examples() -> None:
    guide = "".join(page.read_text() for page in sorted(GUIDE.glob("*.md")))
    shown = dict(re.findall(r"<!-- (docs/examples/\S+) -->\n```python\n(.*?)```", guide, re.DOTALL))
    assert {"docs/examples/train_jax.py", "docs/examples/train_torch.py"} <= set(shown)
    for name, text in shown.items():
        assert (ROOT / name).read_text() == text
        assert len(text.splitlines()) < (60 if "lora" in name else 40)
    for path in EXAMPLES.glob("*.py"):
        assert f"docs/examples/{path.name}" in guide
        assert len(path.read_text().splitlines()) < 60


class Scripts(Processes):
    """Scripts on one Redis, whose run is called `mine` unless the test says otherwise."""

    def __init__(self, url: str, folder: Path, commands: Forks) -> None:
        super().__init__(folder, commands=commands, ARCHIPELAGO_URL=url, OMP_NUM_THREADS="1")
        self.url = url

    def beat(self, island: str, run: str = "mine") -> Heartbeat | None:
        """Return the island's newest heartbeat."""
        try:
            with closing(connect(self.url, run)) as transport:
                beats = [presence.heartbeat for presence in transport.reader.presences()]
        except ArchipelagoError:
            return None
        return next((each for each in beats if each.island == island), None)

    def has_sent(self, island: str, run: str) -> bool:
        """Return whether an island has sent several contributions."""
        found = self.beat(island, run)
        return found is not None and found.sent > 4

    def steer(self, steps: int, run: str = "mine") -> None:
        """Set the length of the run."""
        with closing(connect(self.url, run)) as transport:
            transport.reader.steer({"inner.steps": str(steps)})


@pytest.fixture
def scripts(server: RedisServer, tmp_path: Path, commands: Forks) -> Iterator[Scripts]:
    with empty_database(server, 12) as url:
        started = Scripts(url, tmp_path, commands)
        yield started
        started.end()
        started.show()


@dataclass(frozen=True)
class Example:
    """A script that trains to the end of its run.

    Attributes:
        name: Its file.
        packages: What it needs.
        loss: It must reach a smaller one.
        tensors: Some of the tensors of its run.
        parameters: How many parameters are trained and frozen, if some are frozen.
        launcher: The arguments of Python before the script.
    """

    name: str
    packages: tuple[str, ...]
    loss: float
    tensors: frozenset[str]
    parameters: tuple[int, int] | None = None
    launcher: tuple[str, ...] = ()


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TORCH = frozenset({"0.weight", "2.weight", "2.bias", "4.weight", "4.bias"})
EXAMPLES_THAT_TRAIN = [
    Example("train_torch.py", ("torch",), 3.5, TORCH),
    Example("train_transformers.py", ("transformers", "accelerate"), 3.0, frozenset({"transformer.wte.weight"})),
    Example("train_lightning.py", ("lightning",), 3.5, frozenset({"network.0.weight", "head.bias"})),
    Example("train_accelerate.py", ("accelerate",), 3.5, TORCH),
    Example("train_fsdp.py", ("torch",), 4.5, TORCH, launcher=TORCHRUN),
    Example("train_equinox.py", ("equinox", "sklearn"), 0.5, frozenset({"layers.0.weight", "layers.2.bias"})),
    Example("train_grain.py", ("grain", "sklearn"), 0.5, frozenset({"params.layers_0.kernel"})),
    Example("train_tunix.py", ("tunix",), 0.5, frozenset({"layers.0.kernel"})),
    Example("lora_torch.py", ("torch", "transformers", "peft"), 3.0, frozenset(), (9_728, 115_008)),
    Example("lora_jax.py", (), 0.5, frozenset({"lora.0.a", "lora.2.b"}), (1_104, 5_376)),
]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES_THAT_TRAIN, ids=lambda example: example.name)
def test_an_example_trains_to_the_end_of_its_run(
    example: Example, scripts: Scripts, until: Until, request: pytest.FixtureRequest
) -> None:
    """One that fine-tunes sends adapters only. Those in JAX or with a trainer are forked."""
    for package in example.packages:
        pytorch.installed(package)
    words = [*example.launcher, str(EXAMPLES / example.name), "oslo"]
    if {"transformers", "lightning", "accelerate"} & set(example.packages):
        island = scripts.fork(request.getfixturevalue("forks"), *words, **PACE)
    elif "torch" not in example.packages:
        island = scripts.fork(request.getfixturevalue("commands"), *words, **PACE)
    else:
        island = scripts.python(*words, **PACE)
    until(lambda: scripts.beat("oslo") or island.poll() is not None, "the island to join")

    def has_learnt() -> bool:
        found = scripts.beat("oslo")
        return found is not None and found.sent > 12 and found.loss < example.loss

    with served(scripts.url, "mine"):
        until(lambda: has_learnt() or island.poll() is not None, "a smaller loss")
        last = scripts.beat("oslo")
        assert last is not None
        scripts.steer(last.global_step + 50)
        assert "ends at step" in scripts.ended(island)
    assert has_learnt()
    with closing(connect(scripts.url, "mine")) as transport:
        manifest, counters = transport.reader.manifest(), transport.reader.counters()
    assert {tensor.name for tensor in manifest.tensors} >= example.tensors
    assert counters.merged > 10
    if example.parameters is not None:
        assert (manifest.parameters, manifest.frozen_parameters) == example.parameters
        assert all("lora" in tensor.name for tensor in manifest.tensors)
        assert counters.bytes_up < counters.published * manifest.parameters, (
            "int4 and scales of about half of the adapters"
        )


@pytest.mark.full
@pytest.mark.processes
def test_a_llama_generates_text_beside_a_run(scripts: Scripts, corpus_folder: Path) -> None:
    pytorch.installed("transformers")
    scripts.environment["ARCHIPELAGO_DATA"] = str(corpus_folder)
    scripts.ended(scripts.start("init", "--run", "demo", "--inner.steps=1000000", *SETTINGS))
    listening = scripts.python(str(EXAMPLES / "follow_llama.py"), "import ")
    assert listening.stdout is not None
    line = listening.stdout.readline()
    assert line.startswith("step 0: ") and "import " in line


@pytest.mark.full
@pytest.mark.processes
def test_a_llama_in_pytorch_and_our_island_in_jax_train_one_run(
    scripts: Scripts, corpus_folder: Path, until: Until, forks: Forks
) -> None:
    """A Llama of transformers trains `tiny` beside our island."""
    pytorch.installed("transformers")
    scripts.environment["ARCHIPELAGO_DATA"] = str(corpus_folder)
    scripts.ended(scripts.start("init", "--run", "demo", "--inner.steps=1000000", *SETTINGS))
    scripts.start("merger", "--run", "demo")
    in_torch = scripts.fork(forks, str(EXAMPLES / "train_llama.py"), "torch")
    until(lambda: in_torch.poll() is not None or scripts.has_sent("torch", "demo"), "contributions from PyTorch")
    assert in_torch.poll() is None, scripts.said(in_torch)
    # The newcomer's only peer has the state of an optimiser of PyTorch, with which it can do nothing.
    in_jax = scripts.start("island", "--run", "demo", "--name", "jax")
    until(lambda: in_jax.poll() is not None or scripts.has_sent("jax", "demo"), "contributions from JAX")
    assert in_jax.poll() is None, scripts.said(in_jax)
    joined = scripts.beat("jax", "demo")
    assert joined is not None
    assert joined.optimizer_origin == "fresh"
    scripts.steer(joined.global_step + 100, "demo")
    assert "ends at step" in scripts.ended(in_torch)
    scripts.ended(in_jax)
    last = scripts.beat("torch", "demo")
    assert last is not None
    assert last.loss < 3.6, "a byte of text has 5.5 nats before training"
    with closing(connect(scripts.url, "demo")) as transport:
        counters, tape = transport.reader.counters(), transport.reader.tape(1 << 20)
    assert {member.island for entry in tape for member in entry.members} == {"torch", "jax"}
    assert counters.refused == 0
    assert "layers.0.attention.query.kernel" in find(scripts.url, "demo").params
