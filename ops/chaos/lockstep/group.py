"""The settings that the workers of a group share, and the coordinator of each method."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from archipelago.broker.errors import ConfigError
from archipelago.ops.chaos.lockstep.coordinator import Coordinator, Method
from archipelago.ops.chaos.lockstep.data_parallel import TIMEOUT_SECONDS, DataParallel, Elastic
from archipelago.ops.chaos.lockstep.diloco import Diloco


@dataclass(frozen=True)
class GroupSettings:
    """The settings of a group.

    Attributes:
        method: Its training method.
        config: The run's config as JSON.
        names: Its workers.
        step_seconds: Minimum duration of each worker's steps.
        exchange: A folder in memory for the socket and the slots.
        folder: The folder of saved states.
        outer_rate, outer_momentum: Hyperparameters of DiLoCo's Nesterov step.
    """

    method: Method
    config: str
    names: tuple[str, ...]
    step_seconds: Mapping[str, float]
    exchange: str
    folder: str
    outer_rate: float
    outer_momentum: float

    @property
    def socket(self) -> str:
        """The path of the socket over which the coordinator sends orders."""
        return f"{self.exchange}/socket"

    def to_text(self) -> str:
        """Return a JSON object. `from_text` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> GroupSettings:
        """Read the text of `to_text`. Raise ConfigError for any other."""
        try:
            values = json.loads(text)
            return cls(**{**values, "names": tuple(values["names"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"the file holds no settings of a group ({error!r:.80})",
                "`archipelago chaos --baselines` writes them.",
                code="chaos.group-settings",
            ) from None


def coordinator_of(settings: GroupSettings, interval: int, checkpoint_seconds: float) -> Coordinator:
    """Return the coordinator of a method.

    Args:
        settings: The settings of the group.
        interval: The sync interval H of DiLoCo.
        checkpoint_seconds: Time between two checkpoints of data-parallel training without faults.
    """
    longest = max(settings.step_seconds.values())
    save_every = max(1, math.ceil(checkpoint_seconds / longest))
    match settings.method:
        case "data-parallel":
            return DataParallel(settings.names, save_every)
        case "elastic data-parallel":
            return Elastic(settings.names, save_every, TIMEOUT_SECONDS + longest)
        case "synchronous DiLoCo":
            return Diloco(settings.names, interval)
