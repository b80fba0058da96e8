"""Two processes of JAX with two devices each, which XLA makes of one processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from archipelago.broker.machine import free_port

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class TwoProcesses:
    """Both processes, and where each of them writes."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def wait(self) -> list[int]:
        return [process.wait() for process in self.processes]

    def have_ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def said(self) -> str:
        return "\n".join(log.read_text()[-6000:] for log in self.logs)


@contextmanager
def two_processes(module: str, folder: Path, *arguments: str) -> Iterator[TwoProcesses]:
    """Start a module of the tests with the arguments RANK PORT FOLDER and more, twice. Kill both at the end."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    port, logs = free_port(2), [folder / f"{rank}.log" for rank in (0, 1)]
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for rank, log in enumerate(logs):
            said = stack.enter_context(log.open("w"))
            command = [sys.executable, "-m", module, str(rank), str(port), str(folder), *arguments]
            environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=said, stderr=said)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield TwoProcesses(processes, logs)
