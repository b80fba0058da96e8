"""A callback that makes a Lightning `Trainer` an island."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from archipelago.islands.trainers.island import TrainerIsland, follow_clock, refused, require_one

#: Strategies that keep the parameters in a form that is not merged.
REFUSED = ("DeepSpeedStrategy", "FSDPStrategy", "XLAFSDPStrategy")
#: Callbacks that replace the parameters when training ends, and those that inherit from them.
REPLACING = {"WeightAveraging", "StochasticWeightAveraging"}


class ArchipelagoCallback(Callback):  # type: ignore[misc]  # lightning is optional
    """Makes a `Trainer` an island of a run.

        Trainer(callbacks=[ArchipelagoCallback(url, "mine", steps=20_000)]).fit(model, loader)

    The run's length ends the trainer, not its epochs. Schedules and the progress bar follow the run's clock, which is
    logged as `run_step`. When training ends, the model has the run's parameters. A step counts its examples.
    """

    def __init__(
        self, url: str | None, name: str, steps: int | None = None, *, monitor: str = "val_loss", **options: Any
    ) -> None:
        """Note what to join.

        Args:
            monitor: The logged metric that is the held-out loss.
            url, name, steps, **options: As in `TrainerIsland`.
        """
        self.island, self._monitor = TrainerIsland(url, name, steps, **options), monitor
        self._ends_with_run = False
        self._synced = self._examples = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the trainer run as long as the run does, and let schedules know its length.

        Raises ConfigError (`trainer.option`) if the trainer does what an island cannot.
        """
        if (strategy := type(trainer.strategy).__name__) in REFUSED:
            raise refused(
                f"{strategy} keeps the parameters in a form that is not merged",
                'Use DDP, or FSDP2: `ModelParallelStrategy` with `fully_shard` on its mesh "data_parallel".',
            )
        require_one(trainer.callbacks, ArchipelagoCallback)
        for each in trainer.callbacks:
            if not REPLACING.isdisjoint(kind.__name__ for kind in type(each).__mro__):
                raise refused(
                    f"{type(each).__name__} would replace the run's parameters by this island's own averages",
                    "Leave it out.",
                )
        self._ends_with_run = stage == "fit" and self.island.ends_with_run(trainer.max_steps)
        if self._ends_with_run:
            trainer.fit_loop.max_epochs = -1
            # Lightning would train on until it has made these, after the island has left.
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.fit_loop.epoch_loop.max_steps = self.island.length or trainer.max_steps
            bar = trainer.progress_bar_callback
            if isinstance(bar, TQDMProgressBar | RichProgressBar):
                if not isinstance(bar, _RunBar):
                    bar.__class__ = type(f"Run{type(bar).__name__}", (_RunBar, type(bar)), {})
                bar.island = self.island

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the limit away that schedules have read, or a checkpoint with as many steps would end the training."""
        if self._ends_with_run:
            trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._synced, self._examples = trainer.global_step, 0
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.island.begin(trainer.model, trainer.optimizers, trainer.global_step, trainer.max_steps, scaler)
        self._follow(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Sync after a step of the optimiser, and stop the trainer with the run.

        Raises ConfigError (`trainer.option`) if it cannot count the examples of a batch.
        """
        try:
            self._examples += 0 if self.island.tokens else extract_batch_size(batch) * trainer.world_size
        except MisconfigurationException:
            raise refused(
                f"the examples of a batch of {type(batch).__name__} cannot be counted: it has no tensor",
                "Give the callback `tokens`, the examples of one step of all processes.",
            ) from None
        if trainer.global_step == self._synced or not self.island.is_joined:
            return  # gradients are accumulated
        self._synced, examples, self._examples = trainer.global_step, self._examples, 0
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        loss = loss * trainer.accumulate_grad_batches if torch.is_tensor(loss) else None  # Lightning has divided it
        is_finished = self.island.sync(examples, loss)
        pl_module.log("run_step", float(self.island.step), on_step=True, on_epoch=False)
        self._follow(trainer)
        if is_finished:
            trainer.should_stop = True
            self.island.end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop after an epoch without a batch, as of a stream that has ended. Such epochs would follow for ever."""
        if not trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the held-out loss of the trainer as one of the run."""
        if self._monitor in trainer.callback_metrics and not trainer.sanity_checking:
            self.island.report(float(trainer.callback_metrics[self._monitor]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the run, if the trainer has ended before it."""
        self.island.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run, as the `with` block of a script does."""
        self.island.end(exception)

    def _follow(self, trainer: Any) -> None:
        """Set the learning rates to those of the run's clock, in steps or in epochs of this trainer's length."""
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        for config in trainer.lr_scheduler_configs:
            unit = config.frequency * (1 if config.interval == "step" else max(1, math.ceil(min(per_epoch, 1 << 62))))
            follow_clock(config.scheduler, self.island.step // unit)


class _RunBar(Callback):  # type: ignore[misc]
    """What turns a progress bar of Lightning, which begins again with each epoch, into one of the whole run."""

    island: TrainerIsland

    @property
    def total_train_batches(self) -> int:
        """The length of the run in steps."""
        return self.island.steps

    def _get_train_description(self, current_epoch: int) -> str:
        return str(self.train_description)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin at the run's step. The ETA does not count steps of others before."""
        super().on_train_start(trainer, pl_module)
        if isinstance(self, TQDMProgressBar):
            self.train_progress_bar.n = self.train_progress_bar.initial = self.island.step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Do nothing, where the bar would begin again."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show the run's step and length, instead of a batch's number."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, self.island.step - 1)
        if self.is_enabled:
            self.train_progress_bar.total = self.island.steps
