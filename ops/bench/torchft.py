"""The torchft side of `archipelago bench sync`: two replicas, a lighthouse, and one outer synchronisation per line.

It runs in another Python environment, which has torch and torchft and does not need archipelago. To make one, with
CPython 3.11 or newer:

    python -m venv torchft && torchft/bin/pip install torch==2.13.0 torchft==0.2.0 numpy

    archipelago bench sync --torchft-python torchft/bin/python

Each empty line on standard input is one round: both replicas move their parameters, then both make one step of
torchft's `DiLoCo` (quorum, float32 all-reduce of the outer gradients over Gloo, vote, outer Nesterov step). The answer
is a line of JSON: seconds from the first replica's start to the last one's end, and whether both committed. The first
line of output has the versions, or an `error` if something is missing. torchft's quantised all-reduce needs Triton, and
so a GPU.

With `--mbit`, the second replica is behind a proxy that throttles each direction. Gloo picks its port and writes it
into the store where replicas meet; the second replica reads the proxy's port there instead. The lighthouse, the stores
and the votes, a few kilobytes, are not throttled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import socket
import struct
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipelago.ops.chaos.proxy import Proxy

#: The replicas' addresses. Gloo lets the larger address connect to the smaller one, so the second replica dials.
ADDRESSES = ("127.0.0.1", "127.0.0.3")
#: AF_INET, as a sockaddr_in begins on little-endian Linux. The port, big-endian, and the address follow.
FAMILY = b"\x02\x00"
#: The proxy is loaded by its location, because archipelago need not be installed in this environment.
PROXY = Path(__file__).parents[1] / "chaos" / "proxy.py"
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.5
NOISE = 1e-3


def main() -> int:
    """Read rounds from standard input until its end."""
    options = _options()
    try:
        import torch
        import torchft
    except (ImportError, OSError) as error:
        _answer({"error": f"{sys.executable} cannot import it: {error}"})
        return 1
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=10)
    pipes = [_start(options, lighthouse.address(), index) for index in range(2)]
    _all(pipes, "ready")
    _answer({"torch": torch.__version__, "torchft": _version(torchft)})
    for _ in sys.stdin:
        _all(pipes, "perturb")
        ends = _all(pipes, "sync")
        began, ended = min(end["began"] for end in ends), max(end["ended"] for end in ends)
        committed = all(end["committed"] for end in ends)
        bytes_up, bytes_down = (sum(end[way] for end in ends) for way in ("up", "down"))
        errors = [end["error"] for end in ends if end["error"]]
        _answer({
            "seconds": ended - began, "committed": committed, "errors": errors,
            "bytes_up": bytes_up, "bytes_down": bytes_down, "digests": [end["digest"] for end in ends],
        })  # fmt: skip
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one torchft synchronisation for each line on standard input")
    parser.add_argument("--tensors", type=int, default=12)
    parser.add_argument("--shape", type=int, nargs=2, default=(833, 1000))
    parser.add_argument("--timeout-seconds", type=float, default=60.0)
    parser.add_argument("--mbit", type=float, default=0.0, help="each way, of the second replica; 0 does not throttle")
    return parser.parse_args()


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _version(module: Any) -> str:
    from importlib import metadata

    return metadata.version(module.__name__)


def _start(options: argparse.Namespace, lighthouse: str, index: int) -> Connection:
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


def _replica(pipe: Connection, options: argparse.Namespace, lighthouse: str, index: int) -> None:
    import torch
    from torch import distributed
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager

    torch.manual_seed(0)  # Both replicas begin with the same parameters.
    model = torch.nn.ParameterList(torch.randn(*options.shape) for _ in range(options.tensors))
    torch.manual_seed(1 + index)
    noise = [torch.randn(*options.shape) * NOISE for _ in model]
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=options.timeout_seconds)
    group = _group(index, timeout, options.mbit)
    manager = Manager(
        pg=group, load_state_dict=None, state_dict=None, min_replica_size=2, use_async_quorum=False, init_sync=False,
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
            pipe.send(_synced(manager, inner, group, model) if command == "sync" else command)


def _synced(manager: Any, inner: Any, group: Any, model: Any) -> dict[str, Any]:
    before, error, carried = manager.current_step(), "", group.carried()
    began = time.monotonic()
    try:
        inner.step()
    except Exception as failure:  # noqa: BLE001 - any failure means that the round did not commit
        error = f"{type(failure).__name__}: {failure}"[:300]
    ended = time.monotonic()
    up, down = (now - then for now, then in zip(group.carried(), carried, strict=True))
    return {
        "began": began, "ended": ended, "committed": not error and manager.current_step() > before, "error": error,
        "up": up, "down": down, "digest": float(sum(parameter.double().sum() for parameter in model)),
    }  # fmt: skip


def _group(index: int, timeout: timedelta, mbit: float) -> Any:
    """Return torchft's Gloo group on the replica's own address; the second replica's goes through the proxy."""
    import torch
    from torch import distributed
    from torchft.process_group import ProcessGroupGloo

    gloo = distributed.ProcessGroupGloo

    class Rerouted(distributed.Store):  # type: ignore[misc]
        """The store where Gloo's ends find each other. It returns the proxy's address for the first replica."""

        def __init__(self, store: Any, link: ThinLink) -> None:
            super().__init__()
            self.store, self.link = store, link

        def set(self, key: str, value: Any) -> None:
            self.store.set(key, value)

        def get(self, key: str) -> bytes:
            return self.link.rerouted(bytes(self.store.get(key)))

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            self.store.wait(keys, timeout) if timeout else self.store.wait(keys)

        def add(self, key: str, amount: int) -> int:
            return int(self.store.add(key, amount))

        def check(self, keys: list[str]) -> bool:
            return bool(self.store.check(keys))

    class Group(ProcessGroupGloo):  # type: ignore[misc]
        """torchft's group, on another address."""

        def __init__(self) -> None:
            super().__init__(timeout=timeout)
            self.link = ThinLink(mbit) if mbit and index else None

        def carried(self) -> tuple[int, int]:
            return self.link.carried() if self.link else (0, 0)

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            if self.link:
                self.link.close()
                store = self.kept = Rerouted(store, self.link)
            made = distributed.ProcessGroup(store, rank, world_size)
            made._set_default_backend(distributed.ProcessGroup.BackendType.GLOO)
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [gloo.create_device(hostname=ADDRESSES[index])]
            backend = gloo(store, rank, world_size, options)
            backend._set_sequence_number_for_group()
            made._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, backend)
            return made

    return Group()


class ThinLink:
    """The throttled connection to the first replica: a proxy for each port that it listens on."""

    def __init__(self, mbit: float) -> None:
        self.mbit = mbit
        self.proxies: dict[int, Proxy] = {}
        self._closed = (0, 0)

    def rerouted(self, value: bytes) -> bytes:
        """Replace the port of the first replica's address by a proxy's, wherever the address occurs in `value`."""
        address = socket.inet_aton(ADDRESSES[0])
        at = value.find(FAMILY)
        while at >= 0:
            if value[at + 4 : at + 8] == address:
                (port,) = struct.unpack_from(">H", value, at + 2)
                value = value[: at + 2] + struct.pack(">H", self._proxy(port).port) + value[at + 4 :]
            at = value.find(FAMILY, at + 1)
        return value

    def _proxy(self, port: int) -> Proxy:
        if port not in self.proxies:
            self.proxies[port] = _load_proxy()(ADDRESSES[0], port, self.mbit, self.mbit).start()
        return self.proxies[port]

    def carried(self) -> tuple[int, int]:
        """Return the bytes from and to the second replica so far."""
        up, down = self._closed
        return (
            up + sum(proxy.bytes_up for proxy in self.proxies.values()),
            down + sum(proxy.bytes_down for proxy in self.proxies.values()),
        )

    def close(self) -> None:
        """End all connections. Their bytes stay counted."""
        self._closed = self.carried()
        for proxy in self.proxies.values():
            proxy.stop()
        self.proxies.clear()


def _load_proxy() -> type[Proxy]:
    """Return the class `Proxy`, from its file."""
    name = "archipelago_proxy"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, PROXY)
        assert spec is not None and spec.loader is not None  # noqa: S101
        sys.modules[name] = importlib.util.module_from_spec(spec)  # Dataclasses look up their module there.
        spec.loader.exec_module(sys.modules[name])
    found: type[Proxy] = sys.modules[name].Proxy
    return found


if __name__ == "__main__":
    sys.exit(main())
