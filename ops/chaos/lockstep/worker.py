"""A worker of a baseline. It connects to the coordinator's socket and carries out the orders that it receives.

It shares vectors through memory that all workers map, and saves the state for a restart into files. Its steps have the
same minimum duration as those of an island; the exchange is hidden behind it if both fit into that time.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import guarded
from archipelago.islands.step_throttle import Pacer
from archipelago.ops.chaos.lockstep.coordinator import Order
from archipelago.ops.chaos.lockstep.files import Slots, load, path_of, save
from archipelago.ops.chaos.lockstep.group import GroupSettings
from archipelago.ops.chaos.lockstep.trainees import Trainee, trainee_of


class Follower:
    """The executor of a coordinator's orders.

    Args:
        trainee: The worker's arithmetic.
        slots: Where vectors are shared.
        folder: Where states are saved.
        step_seconds_min: Minimum duration of a step.
        clock, sleep: How the duration is measured and waited for.
    """

    def __init__(
        self,
        trainee: Trainee,
        slots: Slots,
        folder: Path,
        step_seconds_min: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._trainee, self._slots, self._folder = trainee, slots, folder
        self._step_seconds_min, self._clock, self._sleep = step_seconds_min, clock, sleep
        self._pacer = Pacer(step_seconds_min)

    def warm_up(self) -> None:
        """Compile everything, so that no other worker waits for it later."""
        self._trainee.step(0)
        self._trainee.merge(self._trainee.vector(), 1)
        self._trainee.begin()

    def do(self, order: Order) -> None:
        """Carry out one order."""
        trainee = self._trainee
        match order.what:
            case "begin":
                self._pacer = Pacer(self._step_seconds_min)
                trainee.begin()
            case "load":
                self._pacer = Pacer(self._step_seconds_min)
                own = load(self._path(order.own)) if order.own else None
                trainee.load(load(self._path(order.file)), own)
            case "step":
                self._pacer.dispatched(1, self._clock())
                trainee.step(order.n)
                if delay := self._pacer.delay_seconds(self._clock()):
                    self._sleep(delay)
            case "share":
                self._slots.share(order.n, trainee.vector())
            case "merge":
                trainee.merge(self._slots.mean(order.n, order.members), order.n)
            case "save":
                save(self._path(order.file), trainee.shared_state())
            case "save own":
                save(self._path(order.file), trainee.own_state())

    def _path(self, name: str) -> Path:
        return path_of(self._folder, name)


@dataclass(frozen=True)
class WorkerOptions:
    """A worker of a group that trains in lockstep, for `archipelago chaos --baselines`."""

    settings: Path
    """the file with the settings of the group"""
    name: str
    """the name of this worker"""


def main(options: WorkerOptions) -> int:
    """Carry out orders until the connection ends."""
    settings = GroupSettings.from_text(_read(options.settings))
    trainee = trainee_of(settings, options.name)
    slots = Slots(Path(settings.exchange), options.name, trainee.vector().size)
    follower = Follower(trainee, slots, Path(settings.folder), settings.step_seconds[options.name])
    follower.warm_up()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(settings.socket)
        connection.sendall(_line({"name": options.name}))
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                orders = [Order(**{**order, "members": tuple(order["members"])}) for order in message["orders"]]
                for order in orders:
                    follower.do(order)
                steps = sum(order.what == "step" for order in orders)
                connection.sendall(_line({"ticket": message["ticket"], "steps": steps}))
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error})",
            "`archipelago chaos --baselines` writes it.",
            code="chaos.unreadable-file",
        ) from None


def _line(message: dict[str, object]) -> bytes:
    return (json.dumps(message) + "\n").encode()


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(tyro.cli(WorkerOptions, args=sys.argv[1:]))))
