"""A `LocalSGD` for accelerate that syncs with a run of islands."""

from __future__ import annotations

import math
import os
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator, DistributedType

from archipelago.broker.config import SyncConfig
from archipelago.broker.process import RUN_VARIABLE
from archipelago.islands.trainers.island import TrainerIsland, follow_clock, refused


class LocalSGD:
    """Takes the place of accelerate's class of this name: its processes are one island of a run.

        with LocalSGD(accelerator, model, local_sgd_steps=24, url=url, name="mine", steps=20_000) as local:
            while not local.finished:
                for batch in loader:
                    with accelerator.accumulate(model):
                        ...
                        local.step()
                    if local.finished:
                        break

    The processes of the accelerator keep the same parameters, by DistributedDataParallel or FSDP2. Other islands are
    other scripts. When the block ends, the model has the run's parameters. `island` has the run's clock, which prepared
    schedules follow, and `finished` is true when training is to stop.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        local_sgd_steps: int | None = None,
        enabled: bool = True,
        *,
        url: str | None = None,
        name: str | None = None,
        steps: int | None = None,
        **options: Any,
    ) -> None:
        """Note what to join.

        Args:
            accelerator: It has prepared the model and its optimisers.
            enabled: Without it, the script trains alone, and `finished` is true after `steps` steps.
            local_sgd_steps: The steps between two syncs of a fragment (`SyncConfig.interval`) if this creates the run.
            name: The name of the run; None for $ARCHIPELAGO_RUN, or else `local-sgd`.
            url, steps, **options: As in `TrainerIsland`.

        Raises:
            ConfigError: DeepSpeed or Megatron-LM keep the parameters in another form (`trainer.option`).
        """
        kind = accelerator.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise refused(f"{kind.value} keeps the parameters in a form that is not merged", "Use DDP or FSDP2.")
        if local_sgd_steps is not None:
            options.setdefault("sync", SyncConfig(interval=local_sgd_steps))
        self._accelerator, self._model, self._enabled = accelerator, model, enabled
        self.island = TrainerIsland(url, name or os.environ.get(RUN_VARIABLE) or "local-sgd", steps, **options)
        loader = next(iter(accelerator._dataloaders), None)
        self._optimizers: list[Any] = []  # of the model
        self._examples = getattr(loader, "total_batch_size", 1) * accelerator.gradient_accumulation_steps
        self.finished = False

    def __enter__(self) -> Self:
        """Join the run. The model then has its parameters."""
        self.finished, self._alone_steps = False, 0
        if self._enabled:
            own = {id(parameter) for parameter in self._model.parameters()}
            optimizers = self._accelerator._optimizers  # of all models that it has prepared
            has_own = [any(id(p) in own for group in each.param_groups for p in group["params"]) for each in optimizers]
            self._optimizers = [each for each, has in zip(optimizers, has_own, strict=True) if has]
            self.island.begin(self._model, self._optimizers, scaler=self._accelerator.scaler)
            self._follow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the run. Without an error, the model then has the run's parameters."""
        self.island.end(error)

    def step(self, *, tokens: int | None = None, loss: Any = None) -> None:
        """Sync, if the optimiser has made a step. Without `tokens`, a step counts the examples of the first loader."""
        if not self._accelerator.sync_gradients:
            return
        if self.island.is_joined:
            self.finished = self.island.sync(tokens or self._examples, loss)
            self._follow()
        elif not self._enabled:
            self._alone_steps += 1
            self.finished = self._alone_steps >= (self.island.length or math.inf)

    def _follow(self) -> None:
        """Set the learning rates of the model's schedules to those of the run's clock. They count each process."""
        for each in self._accelerator._schedulers:
            if each.step_with_optimizer and any(one is own for one in each.optimizers for own in self._optimizers):
                processes = 1 if each.split_batches else self._accelerator.num_processes
                follow_clock(each.scheduler, self.island.step * processes)
