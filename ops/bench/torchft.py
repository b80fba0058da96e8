"""The torchft side of `archipelago bench sync`: two replicas, a lighthouse, and one outer synchronisation per line.

It runs in another Python environment, which has torch and torchft and does not need archipelago. To make one, with
CPython 3.11 or newer:

    python -m venv torchft && torchft/bin/pip install torch==2.13.0 torchft==0.2.0 numpy

    archipelago bench sync --torchft-python torchft/bin/python

Its argument is a JSON object: the number of `tensors`, the `shape` of each, and `timeout_seconds`. Each empty line on
standard input is one round: both replicas move their parameters, then both make one step of
torchft's `DiLoCo` (quorum, float32 all-reduce of the outer gradients over Gloo, vote, outer Nesterov step). The answer
is a line of JSON: seconds from the first replica's start to the last one's end, and whether both committed. The first
line of output has the versions. torchft's quantised all-reduce needs Triton, and so a GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.5
NOISE = 1e-3


def main() -> int:
    """Read rounds from standard input until its end."""
    options = json.loads(sys.argv[1])
    import torch
    import torchft
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=10)
    pipes = [_start(options, lighthouse.address(), index) for index in range(2)]
    _all(pipes, "ready")
    _answer({"torch": torch.__version__, "torchft": metadata.version(torchft.__name__)})
    for _ in sys.stdin:
        _all(pipes, "perturb")
        ends = _all(pipes, "sync")
        began, ended = min(end["began"] for end in ends), max(end["ended"] for end in ends)
        _answer({"seconds": ended - began, "committed": all(end["committed"] for end in ends)})
    return 0


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _start(options: dict[str, Any], lighthouse: str, index: int) -> Connection:
    spawn = multiprocessing.get_context("spawn")
    parent_end, child_end = spawn.Pipe()
    spawn.Process(target=_replica, args=(child_end, options, lighthouse, index), daemon=True).start()
    child_end.close()
    return parent_end


def _all(pipes: list[Connection], command: str) -> list[Any]:
    """Send both replicas a command at once, and collect their answers."""
    for pipe in pipes:
        pipe.send(command)
    return [pipe.recv() for pipe in pipes]


# -- a replica's process -------------------------------------------------------------------------------------------


def _replica(pipe: Connection, options: dict[str, Any], lighthouse: str, index: int) -> None:
    import torch
    from torch import distributed
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    torch.manual_seed(0)  # Both replicas begin with the same parameters.
    model = torch.nn.ParameterList(torch.randn(*options["shape"]) for _ in range(options["tensors"]))
    torch.manual_seed(1 + index)
    noise = [torch.randn(*options["shape"]) * NOISE for _ in model]
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=options["timeout_seconds"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), load_state_dict=None,
        state_dict=None, min_replica_size=2, use_async_quorum=False, init_sync=False,
        timeout=timeout, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"replica_{index}", hostname="127.0.0.1",
    )  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=0.0)  # Without gradients, a step only calls the hook that syncs.
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        while True:
            try:
                command = pipe.recv()
            except EOFError:
                return
            if command == "perturb":
                with torch.no_grad():
                    for parameter, change in zip(model, noise, strict=True):
                        parameter += change
            pipe.send(_synced(manager, inner) if command == "sync" else command)


def _synced(manager: Any, inner: Any) -> dict[str, Any]:
    before, began = manager.current_step(), time.monotonic()
    try:
        inner.step()
    except Exception as failure:  # noqa: BLE001 - any failure means that the round did not commit
        sys.stderr.write(f"{failure!r:.300}\n")
    return {"began": began, "ended": time.monotonic(), "committed": manager.current_step() > before}


if __name__ == "__main__":
    sys.exit(main())
