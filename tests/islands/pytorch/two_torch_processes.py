"""Two processes of PyTorch on the CPU, with FSDP2 or DistributedDataParallel: one scenario after another.

The arguments are a folder and the URL of a Redis. Each scenario has a run of its name. The second process is forked
after PyTorch was imported. Each writes what it found to a file of JSON in the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import archipelago
from archipelago.broker.codecs import body_of
from archipelago.broker.config import AdoptConfig, RunConfig, WireConfig
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import NO_CORPUS, Manifest, balanced
from archipelago.islands.pytorch.joining import Joining, TorchRun
from archipelago.islands.pytorch.module import ModuleParameters
from archipelago.islands.pytorch.pieces import own_piece, piece_of
from archipelago.islands.pytorch.replica import TeamReplica, TorchReplica
from archipelago.islands.pytorch.state import OptimizerState
from archipelago.islands.pytorch.team import ProcessTeam
from archipelago.islands.team import scripts

join: Any = archipelago.pytorch.join  # the scenarios look into what it returns
SYNC = archipelago.SyncConfig(interval=8, fragments=3)
#: The codec, the adopt rule, the dtype and the shape of the mesh of each comparison with one device.
COMPARED = [
    ("float32", "overwrite", torch.bfloat16, (2,)),
    ("bfloat16", "carry", torch.float32, (2,)),
    ("int8", "overwrite", torch.float32, (2,)),
    ("int4", "carry", torch.bfloat16, (2, 1)),
    ("top3", "overwrite", torch.float32, (1, 2)),
]


def network(dtype: Any = None) -> Any:
    """Return a model with sizes that two processes do not divide, some of them smaller than two."""
    torch.manual_seed(1)
    layers = (torch.nn.Linear(64, 71), torch.nn.Linear(71, 64), torch.nn.Linear(64, 1))
    return torch.nn.Sequential(*layers).to(dtype or torch.float32)


def tuned() -> Any:
    model = network()
    model[0].bias.requires_grad_(False)
    return model


def split(model: Any, shape: tuple[int, ...] = (2,)) -> Any:
    """Split a model over the processes. One parameter stays whole."""
    names = ("replica", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, ignored_params={model[2].bias})


def mesh_of(model: Any) -> Any:
    return model[0].weight.device_mesh


# -- the same bits as one device ---------------------------------------------------------------------------------------


def bits(url: str) -> dict[str, Any]:
    """Send and adopt with two processes and with one, and return the names of the comparisons that differ."""
    return {"different": [name for each in COMPARED for name in compared(*each)]}


def compared(codec: Any, rule: Any, dtype: Any, shape: tuple[int, ...]) -> list[str]:
    """Return what differs."""
    names = {"0.weight": archipelago.pytorch.Place("first", transposed=True)}
    parts = split(network(dtype), shape)
    one, ours = ModuleParameters(network(dtype), names=names), ModuleParameters(parts, names=names)
    config = RunConfig(adopt=AdoptConfig(rule=rule), wire=WireConfig(up=codec))
    tensors = ours.manifest_tensors(lambda name: "rest")
    manifest = Manifest("own", config, tensors, balanced(tensors, 3), NO_CORPUS, {})
    team = ProcessTeam(mesh_of(parts), None, ours.device, "compare")
    team.tell = lambda *about, **numbers: None  # type: ignore[method-assign]
    alone, together = TorchReplica(manifest, one.device), TeamReplica(manifest, ours, team)
    random = np.random.default_rng(7)

    def snapshot(size: int) -> Any:
        return random.normal(size=size).astype(np.float32)

    def given(vector_N: Any) -> Any:
        return vector_N.copy() if team.leads else None

    first = [snapshot(size) for size in manifest.sizes]
    alone.begin(one.named(), [each.copy() for each in first])
    together.begin(ours.named(), [given(each) for each in first])
    different = []
    for turn in range(2):
        step(random, one, ours)
        with one.lent() as held, ours.lent() as named:
            alone.write(held, first)
            together.write(named, [given(each) for each in first])
            lent = differing(one, ours)
            parts(torch.zeros(2, 64, dtype=dtype))  # an evaluation leaves whole parameters behind
        different += [f"{codec} lent {name}" for name in lent + differing(one, ours)]
        for fragment, size in enumerate(manifest.sizes):
            expected, sent = alone.measure(fragment, one.named()), together.measure(fragment, ours.named())
            if team.leads and body_of(sent) != body_of(expected):
                different.append(f"{codec} {turn} sent {fragment}")
            new_N = snapshot(size)
            step(random, one, ours)
            alone.adopt(fragment, one.named(), new_N.copy())
            together.adopt(fragment, ours.named(), given(new_N))
    different += [f"{codec} {name}" for name in differing(one, ours)]
    return different


def differing(one: ModuleParameters, ours: ModuleParameters) -> list[str]:
    """Return the names of the tensors of which this process has another piece than the whole model."""
    pairs = [(name, tensor, ours.named()[name]) for name, tensor in one.named().items()]
    return [name for name, tensor, own in pairs if not torch.equal(piece_of(tensor, own), own_piece(own))]


def step(random: Any, one: ModuleParameters, ours: ModuleParameters) -> None:
    """Change both models by the same numbers."""
    with torch.no_grad():
        for name, tensor in one.named().items():
            change = torch.from_numpy(random.normal(size=tensor.shape).astype(np.float32)).to(tensor.dtype)
            tensor += change
            own = ours.named()[name]
            own_piece(own).add_(piece_of(change, own))


# -- one run -----------------------------------------------------------------------------------------------------------


def island(url: str) -> dict[str, Any]:
    """Create a run, train, give the optimiser's state to an island of one process, and take it from that again."""
    model = split(tuned())
    is_new = archipelago.pytorch.create(url, "island", model, steps=100_000, sync=SYNC)
    again = archipelago.pytorch.create(url, "island", model, steps=100_000, sync=SYNC)
    alone, evaluated = Alone(url), list[float]()
    evaluate, optimizer = noting(evaluated), torch.optim.AdamW(model.parameters(), lr=1e-2)
    with join(url, "island", model, optimizer, island="both", evaluate=evaluate) as run:
        train(model, optimizer, run, lambda: run._loop.ledger.closed > 6 and alone.has_begun())
    model, said = split(tuned()), run.reason
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with join(url, "island", model, optimizer, island="again") as run:
        taken = [float(state["step"]) for state in optimizer.state.values()]
        second = optimizer.state[model[0].weight]["exp_avg_sq"]
        has_moments = len(taken) == 5 and bool((second.to_local() > 0).any()) and second.shape == (71, 64)
        moments = run.optimizer_origin
        train(model, optimizer, run, lambda: run._loop.ledger.closed > 12)
    alone.stop()
    return {"new": [is_new, again], "alone": alone.optimizer_origin, "moments": moments, "steps": taken,
            "evaluated": evaluated, "has_moments": has_moments,
            "reason": said, "step": run.step, "weights": weights(model)}  # fmt: skip


def train(model: Any, optimizer: Any, run: Any, is_enough: Callable[[], bool]) -> None:
    """Train until the first process has enough."""
    enough = torch.zeros(1)
    while not enough:
        loss = model(torch.randn(4, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if model[2].bias.grad is not None:
            dist.all_reduce(model[2].bias.grad)
        optimizer.step()
        run.sync(tokens=8, loss=loss)
        enough.fill_(dist.get_rank() == 0 and is_enough())
        dist.broadcast(enough, 0)


def weights(model: Any) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [float(each.detach().double().sum()) for each in whole]


class Alone:
    """An island of one process: a thread of the first process."""

    def __init__(self, url: str) -> None:
        # All threads take random numbers from one generator: the model is made here, and inputs come from another one.
        self.optimizer_origin, self._url, self._model = "", url, tuned()
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._train, daemon=True)

    def has_begun(self) -> bool:
        """Begin, and return whether the island trains."""
        if not self._thread.ident:
            self._thread.start()
        return bool(self.optimizer_origin)

    def _train(self) -> None:
        model, generator = self._model, torch.Generator()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # `join` refuses a model in no wrapper in one of several processes.
        with TorchRun(Joining(self._url, "island", model, [optimizer], island="alone")) as run:
            self.optimizer_origin = run.optimizer_origin
            while not self._stop.wait(0.005):
                loss = model(torch.randn(4, 64, generator=generator)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.sync(tokens=4, loss=loss)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join()


def lost(url: str) -> dict[str, Any]:
    """Kill the second process, and return how the first one ends."""
    model = split(network())
    archipelago.pytorch.create(url, "lost", model, steps=100_000, sync=SYNC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ended, run = "", join(url, "lost", model, optimizer, island="both")
    try:
        with run:
            train(model, optimizer, run, lambda: bool(dist.get_rank()) or run.step > 20)
            if dist.get_rank() == 1:
                os._exit(0)
            train(model, optimizer, run, lambda: False)
    except RuntimeError as error:
        ended = type(error).__name__
    return {"ended": ended, "reason": run.reason}


def stopped(url: str, run_name: str = "stopped", *, heeds: bool = True) -> dict[str, Any]:
    """Get SIGTERM in the second process, and a step later in the first, as `torchrun` sends it to both."""
    model = split(network())
    archipelago.pytorch.create(url, run_name, model, steps=100_000, sync=SYNC)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps, status, run = 0, 0, join(url, run_name, model, optimizer, island="both")
    try:
        with run:
            while not (heeds and run.finished):
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if steps == 30 + (dist.get_rank() == 0):
                    os.kill(os.getpid(), signal.SIGTERM)
                run.sync(tokens=8)
                steps += 1
    except SystemExit as error:
        status = int(error.code or 0)
    run.final()
    unsent = run._loop.ledger.unsent_tokens if dist.get_rank() == 0 else 0
    return {"steps": steps, "status": status, "unsent": unsent, "reason": run.reason,
            "sums": weights(model)}  # fmt: skip


def deaf(url: str) -> dict[str, Any]:
    """Do the same with a loop that does not look at `finished`."""
    return stopped(url, "deaf", heeds=False)


def refused(url: str) -> dict[str, Any]:
    """Return the codes of the errors of wrong use."""
    model, memory = split(network()), "fakeredis://x"
    found = {"calls": code(lambda: several_calls(model, memory))}
    pair = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    twice = torch.nn.Linear(4, 4)
    twice.weight = torch.nn.Parameter(distribute_tensor(twice.weight.detach(), pair, [Shard(0), Shard(1)]))
    found["twice"] = code(lambda: join(memory, "own", twice))
    mixed = split(network())
    mixed[2].bias = torch.nn.Parameter(distribute_tensor(torch.zeros(2), pair["a"], [Shard(0)]))
    found["meshes"] = code(lambda: join(memory, "own", mixed))
    old = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    found["unwrapped"] = code(lambda: join(memory, "own", network()))
    found["first fsdp"] = code(lambda: join(memory, "own", old))
    with torch.no_grad():
        model[0].bias.to_local().fill_(float("nan"))
    found["nan"] = code(lambda: archipelago.pytorch.create(memory, "nan", model, steps=10))
    found["no run"] = code(lambda: join(memory, "none", model).__enter__())
    return found


def several_calls(model: Any, url: str) -> None:
    """Create in the first process, and join in the second."""
    if dist.get_rank() == 0:
        archipelago.pytorch.create(url, "own", model, steps=10)
    else:
        join(url, "own", model).__enter__()


def code(call: Callable[[], object]) -> str:
    try:
        call()
    except ArchipelagoError as error:
        return error.code
    return ""


def replicated(url: str) -> dict[str, Any]:
    """Train one island in DistributedDataParallel, and return digests of its parameters and first moments."""
    torch.manual_seed(dist.get_rank())  # the processes begin with different parameters, and read different data
    layers = torch.nn.Linear(8, 8, dtype=torch.bfloat16), torch.nn.Linear(8, 1, dtype=torch.bfloat16)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        archipelago.pytorch.create(url, "replicated", model, steps=120, sync=SYNC)
    dist.barrier()
    torch.manual_seed(dist.get_rank())
    evaluated = list[float]()
    joined = join(url, "replicated", model, optimizer, island="both", evaluate=noting(evaluated))
    with joined as run:
        while not run.finished:
            inputs = torch.randn(4, 8, dtype=torch.bfloat16)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.sync(tokens=8, loss=loss)
        clock = run.step, run.reason
        travels = [run._state.can_travel, of_one_process_each(model).can_travel]
    run.final()
    scripts.MEETING_SECONDS = 0.1
    if dist.get_rank() == 1:
        dist.barrier()
    alone = code(lambda: run.final(0.0))  # first in one process, then in the other
    if dist.get_rank() == 0:
        dist.barrier()
    tensors = {"values": list(model.parameters()), "moments": [each["exp_avg"] for each in optimizer.state.values()]}
    flat = {name: torch.cat([each.detach().float().reshape(-1) for each in tensors[name]]) for name in tensors}
    digests = {name: hashlib.sha256(values.numpy().tobytes()).hexdigest() for name, values in flat.items()}
    found = {"step": clock, "alone": alone, "evaluated": evaluated, "travels": travels}
    return {**found, **digests, "sums": weights(model)}


def of_one_process_each(model: Any) -> OptimizerState:
    """Return the state of an optimiser that keeps the moments of one parameter in each process, as some Muons do."""
    tensors = dict(model.named_parameters())
    state = OptimizerState([torch.optim.AdamW([list(tensors.values())[dist.get_rank()]])], tensors)
    state.rehearse()
    ProcessTeam(None, None, torch.device("cpu"), "of one process each").agree_on_state(state)
    return state


def noting(evaluated: list[float]) -> Callable[[Any], float]:
    """Return a function that evaluates a model, with all processes of an island, and notes what it finds."""

    def evaluate(model: Any) -> float:
        size = next(model.parameters()).shape[-1]
        evaluated.append(float(model(torch.ones(2, size, dtype=next(model.parameters()).dtype)).square().mean()))
        return evaluated[-1]

    return evaluate


#: The last scenario ends a process.
SCENARIOS = [bits, refused, replicated, island, stopped, deaf, lost]


def end(failure: threading.ExceptHookArgs) -> None:
    """Tell of the error of a thread, for which the other ones would wait, and end this process."""
    threading.__excepthook__(failure)
    os._exit(1)


def main(folder: Path, url: str) -> None:
    """Play all scenarios in two processes. A failure of any thread ends them."""
    threading.excepthook = end
    rank = 0 if (child := os.fork()) else 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for scenario in SCENARIOS:
        found = scenario(url)
        written = folder / f"{scenario.__name__}-{rank}.part"
        written.write_text(json.dumps(found))
        written.rename(written.with_suffix(".json"))
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
