"""A run of `tiny` in real processes: a Llama of transformers in PyTorch trains beside an island of ours in JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.messages import Heartbeat
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.weights.parameters import from_redis
from tests import pytorch
from tests.conftest import Until

pytestmark = [pytest.mark.full, pytest.mark.processes]

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train_llama.py"
#: Far more than the test makes: it ends the run once both islands have contributed.
STEPS = 100_000
MORE_STEPS = 100
#: A byte of text has 5.5 nats before training.
LOSS = 3.6


class Processes:
    """Starts processes on one Redis, and ends them all."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "ARCHIPELAGO_URL": self.url, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"process-{len(self.all)}.log").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=out, stderr=subprocess.STDOUT, text=True,
                cwd=self.folder,
            )  # fmt: skip
        self.all.append(process)
        return process

    def verb(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("-P", "-m", "archipelago.ops", *arguments)

    def said(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"process-{self.all.index(process)}.log").read_text()


@pytest.fixture
def processes(tmp_path: Path, corpus: OpenCorpus) -> Iterator[Processes]:
    with start_server(tmp_path / "redis") as server:
        started = Processes(server.url, tmp_path)
        yield started
        for process in started.all:
            if process.poll() is None:
                process.kill()
            process.wait()


def beat(transport: RedisTransport, island: str) -> Heartbeat | None:
    """Return the island's newest heartbeat."""
    beats = [presence.heartbeat for presence in transport.reader.presences()]
    return next((each for each in beats if each.island == island), None)


def test_a_llama_in_pytorch_and_our_island_in_jax_train_one_run(processes: Processes, until: Until) -> None:
    pytorch.required("transformers")
    made = processes.verb(
        "init", "--run", "demo", "--data.corpus", "small-text", "--model.size", "tiny", "--inner.steps", str(STEPS),
        "--sync.interval", "12",
    )  # fmt: skip
    assert made.wait() == 0, processes.said(made)
    transport = connect(processes.url, "demo")
    processes.verb("merger", "--run", "demo")
    in_torch = processes.start(str(SCRIPT), "torch")

    def sent(island: str) -> int:
        found = beat(transport, island)
        return 0 if found is None else found.sent

    until(lambda: in_torch.poll() is not None or sent("torch") > 4, "contributions from PyTorch")
    assert in_torch.poll() is None, processes.said(in_torch)
    # The newcomer's only peer has the state of an optimiser of PyTorch, with which it can do nothing.
    in_jax = processes.verb("island", "--run", "demo", "--name", "jax")
    until(lambda: in_jax.poll() is not None or sent("jax") > 4, "contributions from JAX")
    assert in_jax.poll() is None, processes.said(in_jax)
    joined = beat(transport, "jax")
    assert joined is not None
    assert joined.moments == "fresh"
    made = processes.verb("steer", "--run", "demo", f"inner.steps={joined.global_step + MORE_STEPS}")
    assert made.wait() == 0, processes.said(made)
    for process in (in_torch, in_jax):
        until(lambda process=process: process.poll() is not None, "the run to end")
        assert process.returncode == 0, processes.said(process)
    assert "ends at step" in processes.said(in_torch)
    last = beat(transport, "torch")
    assert last is not None
    assert last.loss < LOSS
    books, tape = transport.reader.books(), transport.reader.tape(1 << 20)
    transport.close()
    assert {member.island for entry in tape for member in entry.members} == {"torch", "jax"}
    assert books.refused == 0
    assert "layers.0.attention.query.kernel" in from_redis(processes.url, "demo").params
