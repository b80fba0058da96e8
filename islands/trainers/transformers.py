"""A callback that makes a Hugging Face `Trainer` an island, and so the trainers of TRL."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, get_scheduler
from transformers.trainer_callback import DefaultFlowCallback

from archipelago.islands.trainers.island import TrainerIsland, follow_clock, refused, require_one

#: A trainer that ends with the run may make this many times its steps. The run ends it long before.
ROOM = 10
#: The least length of such a trainer, which may not know the run's, or makes many steps before a merger serves the run.
LENGTH_MIN = 1_000_000
#: The same where `max_steps` is given, as for data without a length: after each pass, `Trainer` counts up to it.
STREAM_LENGTH_MIN = 10_000


class ArchipelagoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is optional
    """Makes a `Trainer` an island of a run.

        Trainer(model, args, train_dataset=data, callbacks=[ArchipelagoCallback(url, "mine", steps=20_000)])

    The run's length ends the trainer, not its epochs. The learning rate, the progress bar and its ETA follow the run's
    clock. When training ends, the model has the run's parameters. A step counts its examples, or its tokens if the
    trainer counts them (`include_num_input_tokens_seen`).
    """

    def __init__(
        self, url: str | None, name: str, steps: int | None = None, *, monitor: str = "eval_loss", **options: Any
    ) -> None:
        """Note what to join.

        Args:
            monitor: The metric of an evaluation that is the held-out loss. With several data sets, `eval_NAME_loss`.
            url, name, steps, **options: As in `TrainerIsland`.
        """
        self.island, self._monitor = TrainerIsland(url, name, steps, **options), monitor
        self._ends_with_run = self._made_schedule = False
        self._loss: float | None = None
        self._seen = self._scheduled = 0

    def on_init_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """Let the trainer run as long as the run does. Raises ConfigError as `_require_mergeable`."""
        _require_mergeable(args)
        self._made_schedule = about["lr_scheduler"] is None
        self._ends_with_run = self.island.ends_with_run(args.max_steps)
        if self._ends_with_run:
            least = STREAM_LENGTH_MIN if args.max_steps > 0 else LENGTH_MIN
            args.max_steps = max(args.max_steps, ROOM * max(self.island.length or 0, least))

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        _require_mergeable(args)  # of a trainer that got the callback after it was made
        if getattr(args, "use_vllm", False) and hasattr(about["model"], "peft_config"):
            raise refused(
                "TRL merges adapters into the frozen weights for vLLM, and back, which rounds them",
                "Set `use_vllm=False`, or train without adapters.",
            )
        callbacks = _all_callbacks()
        require_one(callbacks, ArchipelagoCallback)
        limit = 0 if self._ends_with_run else state.max_steps
        optimizer = about["optimizer"]
        self.island.begin(about["model"], [optimizer], state.global_step, limit, getattr(optimizer, "scaler", None))
        self._seen, self._scheduled = state.num_input_tokens_seen, 0
        if self._ends_with_run:
            state.compute_steps(args, self.island.steps)
        self._follow(args, about["lr_scheduler"])
        for shown in callbacks:
            for event in ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end"):
                if type(shown).__name__.endswith("ProgressCallback"):
                    setattr(shown, event, partial(self._show, getattr(type(shown), event).__get__(shown)))

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> Any:
        """Sync after a step of the optimiser, and stop the trainer with the run."""
        seen, self._seen = self._seen, state.num_input_tokens_seen
        examples = state.train_batch_size * args.gradient_accumulation_steps * args.world_size
        loss, self._loss = self._loss, None
        is_finished = self.island.sync(self._seen - seen or examples, loss)
        self._follow(args, about["lr_scheduler"])
        if is_finished:  # then the trainer logs, evaluates and saves, as at an end of its own
            ended = copy.copy(state)
            ended.max_steps = state.global_step
            control = DefaultFlowCallback().on_step_end(args, ended, control)
        if control.should_training_stop:
            self.island.end()
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **about: Any) -> None:
        """Keep the newest loss for the next sync."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **about: Any) -> None:
        """Record the held-out loss of the trainer as one of the run."""
        if self._monitor in (metrics or {}):
            self.island.report(metrics[self._monitor])

    def on_train_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """Leave the run, if the trainer has ended before it."""
        self.island.end()

    def _follow(self, args: Any, schedule: Any) -> None:
        """Set the learning rate to that of the run's clock, over the run's length."""
        steps = self.island.steps
        if self._made_schedule and isinstance(schedule, LambdaLR) and self._scheduled != steps:
            self._scheduled, blank = steps, torch.optim.SGD([torch.zeros(1)], lr=1.0)
            kind, warmup, more = args.lr_scheduler_type, args.get_warmup_steps(steps), args.lr_scheduler_kwargs
            (rate,) = get_scheduler(kind, blank, warmup, steps, more).lr_lambdas
            schedule.lr_lambdas = [rate] * len(schedule.lr_lambdas)
        follow_clock(schedule, self.island.step)

    def _show(self, event: Any, args: Any, state: Any, control: Any, **about: Any) -> Any:
        """Let a progress bar see the run's clock instead of the trainer's."""
        shown, island = copy.copy(state), self.island
        shown.global_step, shown.max_steps = island.step, island.steps
        shown.num_train_epochs = -(-state.num_train_epochs * island.steps // max(state.max_steps, 1))
        returned, own = event(args, shown, control, **about), event.__self__
        bar = getattr(own, "training_bar", getattr(own, "training_tracker", None))
        for each in getattr(bar, "tasks", [bar] if bar is not None else []):  # TRL's bar has tasks
            each.total = island.steps
        if event.__name__ == "on_train_begin" and bar is not None:  # the ETA does not count steps of others before
            own.current_step = bar.n = bar.initial = island.step
        return returned


def _require_mergeable(args: Any) -> None:
    """Raise ConfigError (`trainer.option`) if the trainer does what an island cannot."""
    if args.deepspeed:
        raise refused("DeepSpeed keeps the parameters in a form that is not merged", "Use FSDP2 or DDP.")
    if args.load_best_model_at_end:
        raise refused(
            "`load_best_model_at_end` would replace the run's parameters by this island's own", "Leave it out."
        )


def _all_callbacks() -> list[Any]:
    """Return the callbacks of the trainer that tells of an event. No event has them, so we look at the caller."""
    caller = inspect.currentframe()
    while caller is not None and not hasattr(caller.f_locals.get("self"), "callbacks"):
        caller = caller.f_back
    return list(caller.f_locals["self"].callbacks) if caller else []
