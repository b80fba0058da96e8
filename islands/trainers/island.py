"""The membership of a trainer in a run: what the callbacks of all trainers have in common."""

from __future__ import annotations

import atexit
import bisect
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.islands.models.llama import Names
from archipelago.islands.pytorch.joining import Joining, create, membership
from archipelago.islands.pytorch.module import unwrapped
from archipelago.islands.pytorch.pieces import mesh_of
from archipelago.islands.user_loop.tensors import Trained

log = logging.getLogger(__name__)

#: The islands of this process that are in a run. A trainer has no event for an exception, so some may be left over.
_JOINED: list[TrainerIsland] = []


class TrainerIsland:
    """One trainer's island. It joins when training begins and leaves when it ends, as often as the trainer trains.

    Attributes:
        length: The length in steps of a run that the trainer creates, if it does.
        tokens: The tokens of one step, if the trainer does not count them.
    """

    def __init__(
        self,
        url: str | None,
        name: str,
        steps: int | None = None,
        *,
        tokens: int | None = None,
        island: str | None = None,
        trained: Trained | None = None,
        names: Names | None = None,
        wait_seconds: float = 30.0,
        final_seconds: float = 60.0,
        **settings: Any,
    ) -> None:
        """Note what to join. Nothing is contacted before training begins.

        Args:
            url: The URL of the Redis, or the path of a join file; None for $ARCHIPELAGO_URL.
            name: The name of the run.
            steps: The length of the run. The first island creates the run with it. None joins a run that exists.
            tokens: The tokens of one step of this island. None counts as the trainer does, most often examples. All
                islands of a run must count the same unit.
            final_seconds: How long to wait at the end until the last rounds of the run are merged.
            island, trained, names, wait_seconds: As in `archipelago.pytorch.join`.
            **settings: The other arguments of `archipelago.pytorch.create`, such as `sync`.

        Raises:
            ConfigError: `steps` is no length (`config.value`).
            TypeError: `create` has no such argument.
        """
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ConfigError(f"`steps` cannot be {steps!r}", "Give a length such as 20_000.", code="config.value")
        self._url, self._name, self.length, self.tokens = url, name, steps, tokens
        self._shared: dict[str, Any] = {"trained": trained, "names": names, "wait_seconds": wait_seconds}
        self._island, self._settings, self._final_seconds = island, settings, final_seconds
        # A misspelt setting is an error here, and not when training begins.
        inspect.signature(create).bind(url, name, None, steps=steps, **self._shared, **settings)
        self._run: Any = None  # the last one, from the first training on
        self._scaler: Any = None
        self._scale = 0.0
        self._is_short = self._is_signalled = False

    @property
    def is_joined(self) -> bool:
        """Whether the island is in the run now."""
        return self in _JOINED

    @property
    def step(self) -> int:
        """The run's clock in steps; the last one after the island has left."""
        return 0 if self._run is None else int(self._run.step)

    @property
    def steps(self) -> int:
        """The length of the run in steps."""
        return 0 if self._run is None else int(self._run.steps)

    @property
    def reason(self) -> str:
        """Why the island stops or has left, as `run.reason` of a script; empty before."""
        return "signalled" if self._is_signalled else "" if self._run is None else str(self._run.reason)

    def ends_with_run(self, limit: int) -> bool:
        """Return whether a trainer trains until the run ends, from its own limit in steps, if it is positive."""
        return limit <= 0 or (self.length is not None and self.length <= limit)

    def begin(self, model: Any, optimizers: Sequence[Any], made: int = 0, limit: int = 0, scaler: Any = None) -> None:
        """Create the run if there is none, and join it. The model then has the run's parameters.

        An island of this process that is still in the run leaves it first: an exception has ended its training.

        Args:
            model: The module that is trained, wrapped or not. All processes of the trainer's group are one island.
            optimizers: Its optimisers. Wrappers of accelerate are taken off.
            made: The steps that the trainer has made before, according to its checkpoint.
            limit: The steps after which the trainer ends, if it does not end with the run.
            scaler: Its `GradScaler`, if it has one. The steps that this skips are none of the run.

        Raises:
            ConfigError: The model is spread over devices (`loop.sharded`), or what `create` and `join` raise.
        """
        for island in _JOINED.copy():
            if (island._url, island._name) == (self._url, self._name):
                island.end(RuntimeError("another training began before this one had ended, most often by an exception"))
        inner, group = unwrapped(model)
        if len(places := set(getattr(inner, "hf_device_map", {}).values())) > 1:
            raise ConfigError(
                f"the model is spread over {', '.join(sorted(map(str, places)))} by its `device_map`",
                "Load it without `device_map`, on one device, or split it by FSDP2. CPU offload cannot be merged.",
                code="loop.sharded",
            )
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        before: Callable[[], object] | None = None
        if self.length is not None:
            before = partial(create, self._url, self._name, model, steps=self.length, **self._shared, **self._settings)
            if mesh_of(inner) is not None:
                before()  # all processes have a part of the model
                before = None
        bare = [getattr(each, "optimizer", each) for each in optimizers]
        given = Joining(self._url, self._name, model, bare, island=self._island, before=before, **self._shared)
        run = membership(given, group)
        self._run, self._is_signalled = run.__enter__(), False
        _JOINED.append(self)
        self._scaler, self._scale = scaler, scaler.get_scale() if scaler else 0.0
        atexit.register(self._at_exit)
        if made:
            log.warning(
                "the parameters are those of the run at step %s, not those of the trainer's checkpoint",
                f"{self.step:,}", extra={"code": "trainer.resumed"},
            )  # fmt: skip
        self._is_short = 0 < limit < self.steps
        if self._is_short:
            log.warning(
                "this trainer ends after %s steps, before the %s of the run. Leave out `max_steps`, or give at least "
                "as many as the run has; and give the callback to the trainer when you make it",
                f"{limit:,}", f"{self.steps:,}", extra={"code": "trainer.short"},
            )  # fmt: skip

    def sync(self, tokens: int, loss: Any = None) -> bool:
        """Sync after a step of the optimiser, with what the trainer counted in it. Return whether to stop.

        Raises:
            ConfigError: Another trainer has begun in this process meanwhile (`trainer.option`), or as `sync` does.
        """
        if not self.is_joined:
            raise refused("another trainer of this process trains for the run now", "Let one train after the other.")
        before, self._scale = self._scale, self._scaler.get_scale() if self._scaler else 0.0
        if self._scale >= before:  # else the gradients were not finite, and no parameter has changed
            self._run.sync(tokens=self.tokens or max(tokens, 1), loss=loss)
        return bool(self._run.finished)

    def report(self, loss: float) -> None:
        """Record a held-out loss, also of the run's parameters after the end. One that cannot be is only logged."""
        try:
            if self._run is not None:
                self._run.report(held_out=loss)
        except ArchipelagoError as error:
            log.warning("the held-out loss is not recorded: %s", error, extra={"code": error.code})

    def end(self, error: BaseException | None = None) -> None:
        """Leave the run, if the island is in it, as the `with` block of a script does.

        Without an error, the model then has the run's parameters. Only after SIGTERM it keeps its own, because the
        process has little time.
        """
        if not self.is_joined:
            return
        run = self._run
        _JOINED.remove(self)
        atexit.unregister(self._at_exit)
        if error is not None:
            self._is_signalled = isinstance(error, SystemExit)  # by which Lightning ends at SIGTERM
            run.__exit__(type(error), error, None)
            return
        is_signalled = run.reason == "signalled"
        if not run.reason and not self._is_short:
            log.warning(
                "this trainer ended at step %s of the run's %s, which goes on without it. Train for more epochs, or "
                "until `finished`", f"{self.step:,}", f"{self.steps:,}", extra={"code": "trainer.short"},
            )  # fmt: skip
        if is_signalled or not run.reason:
            run.leave()
        if not is_signalled:
            self.final()

    def final(self, timeout: float | None = None) -> None:
        """Give the model the run's parameters, as `final` of a script does. None waits for `final_seconds`."""
        self._run.final(self._final_seconds if timeout is None else timeout)

    def _at_exit(self) -> None:
        """Leave a run whose trainer has not said that it ended, most often because of an exception."""
        last = getattr(sys, "last_value", None)  # what has ended the script, if it was not caught
        self.end(last or RuntimeError("the trainer ended with an exception"))


def follow_clock(schedule: Any, step: int) -> None:
    """Set the learning rates of a schedule of PyTorch to those at a step of the run.

    A schedule without a formula of the step, such as `ReduceLROnPlateau`, counts its own steps on.
    """
    if isinstance(schedule, SequentialLR):
        part = bisect.bisect_right(schedule._milestones, step)
        follow_clock(schedule._schedulers[part], step - (0, *schedule._milestones)[part])
        schedule.last_epoch, schedule._last_lr = step, schedule._schedulers[part].get_last_lr()
        return
    if not (isinstance(schedule, LambdaLR | OneCycleLR) or hasattr(schedule, "_get_closed_form_lr")):
        return
    if isinstance(schedule, OneCycleLR):
        schedule.last_epoch = min(step, schedule.total_steps - 1) - 1
        with warnings.catch_warnings(action="ignore"):  # the first call comes before the optimiser's first step
            schedule.step()
        return
    schedule.last_epoch = step
    if isinstance(schedule, LambdaLR):
        rates = [rate * of(step) for rate, of in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    else:
        rates = schedule._get_closed_form_lr()
    schedule._last_lr = rates
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def refused(what: str, remedy: str) -> ConfigError:
    """Return the error that an option of the trainer does not work in an island."""
    return ConfigError(what, remedy, code="trainer.option")


def require_one(callbacks: Sequence[Any], kind: type) -> None:
    """Raise ConfigError (`trainer.option`) if a trainer has two callbacks that sync."""
    if sum(isinstance(each, kind) for each in callbacks) > 1:
        raise refused("the trainer has this callback twice, so it would sync each step twice", "Give it one.")
