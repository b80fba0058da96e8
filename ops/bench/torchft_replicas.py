"""Run torchft's side of `archipelago bench sync`: `torchft.py`, in a Python environment that has torchft."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archipelago.broker.errors import BrokerError
from archipelago.ops.bench.two_islands import PATIENCE_SECONDS, TENSORS, THIN_TIMEOUT_SECONDS, Size, Synced
from archipelago.ops.launch import parent_death

SCRIPT = Path(__file__).with_name("torchft.py")
END_SECONDS = 10.0


class Torchft:
    """Two replicas and a lighthouse in another Python environment; `reason` says why there are none."""

    def __init__(self, name: str, reason: str, process: subprocess.Popen[str] | None) -> None:
        self.name, self.reason, self._process = name, reason, process

    @property
    def usable(self) -> bool:
        """True if torchft runs and can sync."""
        return not self.reason

    def sync(self) -> Synced:
        """Synchronise all parameters once. Raise BrokerError if the process ends instead."""
        assert self._process is not None  # noqa: S101
        found = _answer(self._process, "\n")
        if "seconds" not in found:
            raise BrokerError(
                f"torchft ended: {found['error']}",
                "Leave --torchft-python out to measure without it.",
                code="bench.torchft-ended",
            )
        size = found["bytes_up"] + found["bytes_down"]
        return Synced(found["seconds"], found["committed"], size / 1e6 if size else math.nan)


@contextlib.contextmanager
def torchft(size: Size, python: str, mbit: float = 0.0) -> Iterator[Torchft]:
    """Start torchft with tensors of the same shapes.

    Args:
        size: The shapes and their number.
        python: Path of a Python that has torchft; empty for none.
        mbit: Rate of the second replica's link each way, in Mbit/s; 0 does not throttle it.
    """
    if not python:
        yield Torchft("torchft", "no environment: give --torchft-python, or $ARCHIPELAGO_TORCHFT_PYTHON", None)
        return
    arguments = ["--tensors", str(TENSORS), "--shape", *map(str, size.shape), "--mbit", str(mbit)]
    arguments += ["--timeout-seconds", str(THIN_TIMEOUT_SECONDS if mbit else PATIENCE_SECONDS)]
    # -P: without it, Python would put the folder of the script, and so our modules, before its own packages.
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                parent_death.command([python, "-P", str(SCRIPT), *arguments]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        except OSError as error:
            yield Torchft("torchft", f"{python} cannot be run: {error.strerror}", None)
            return
        try:
            found = _answer(process, "")
            if "error" in found:
                log.seek(0)
                last = (log.read().strip().splitlines() or [""])[-1]
                found["error"] += f" ({last:.200})" if last else ""
            yield Torchft(f"torchft {found.get('torchft', '')}".strip(), found.get("error", ""), process)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Close its standard input, which ends it and its replicas; kill it if that does not help."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=END_SECONDS)
    process.kill()
    process.wait()


def _answer(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    """Send the process a line and return its next answer, or an `error` if it has ended."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    answer = process.stdout.readline()
    try:
        found = json.loads(answer)
    except ValueError:
        return {"error": f"it ended with status {process.wait()}"}
    return found if isinstance(found, dict) else {"error": f"it answered {answer:.80}"}
