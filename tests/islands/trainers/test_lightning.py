"""The callback of Lightning's `Trainer`, with the real package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.broker.errors import BrokerError, ConfigError
from archipelago.broker.observe.losses import loss_unit
from archipelago.broker.redis.transport import connect
from archipelago.islands.pytorch.module import ModuleParameters
from tests import pytorch
from tests.failing import failing
from tests.islands.user_loop.any_framework import merged_by, served

torch = pytorch.required()
lightning = pytorch.required("lightning")

from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

from archipelago.lightning import ArchipelagoCallback  # noqa: E402 - it imports lightning
from tests.islands.trainers.trainer_scripts import examples, lightning_module, loader, overflowing  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

SYNC = SyncConfig(interval=4, fragments=2)


def trainer(*callbacks: Any, **options: Any) -> Any:
    asked = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1, **options}
    return lightning.Trainer(accelerator="cpu", callbacks=list(callbacks), **asked)


class Watch(lightning.Callback):  # type: ignore[name-defined, misc]
    """Notes the run's clock and the learning rate after each step."""

    def __init__(self, run: ArchipelagoCallback) -> None:
        self.island, self.seen, self.losses = run.island, set[tuple[int, float]](), list[float]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *about: Any) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.seen.add((self.island.step, trainer.optimizers[0].param_groups[0]["lr"]))


def test_a_module_of_fabric_has_the_names_of_the_one_inside() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    for model in (lightning_module(), torch.compile(lightning_module(), backend="eager")):
        assert list(ModuleParameters(fabric.setup_module(model)).tensors) == list(ModuleParameters(model).tensors)


def test_a_trainer_trains_until_the_run_ends_on_its_clock(url: str) -> None:
    callback = ArchipelagoCallback(url, "own", steps=60, sync=SYNC, island="a")
    watch = Watch(callback)
    model = lightning_module(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 60))
    archipelago.pytorch.create(url, "own", model, steps=60, sync=SYNC)
    with served(url) as merger:
        precision = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", overflowing(model))
        made = trainer(callback, watch, accumulate_grad_batches=2, plugins=[precision], min_steps=10_000)
        made.fit(model, loader())
        merged = merged_by(merger)
    assert 60 <= made.global_step < 10_000, "neither epochs nor `min_steps` decide when it ends"
    assert {step for step, _ in watch.seen} >= {0, 60}
    assert all(rate == pytest.approx(0.01 * (1 - step / 60)) for step, rate in watch.seen)
    reported = [each.loss for entry in connect(url, "own").reader.tape(1000) for each in entry.members]
    assert 0.9 * min(watch.losses) <= min(reported) <= max(reported) <= 1.1 * max(watch.losses)
    (tokens,) = {each.heartbeat.tokens for each in connect(url, "own").reader.presences()}
    assert tokens == (made.global_step - 1) * 16, "once for two batches, but for the step that the scaler skipped"
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.detach(), torch.from_numpy(merged[name]), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["TQDMProgressBar", "RichProgressBar"])
def test_its_bar_follows_a_run_whose_length_is_steered(url: str, kind: str) -> None:
    bar = getattr(lightning.pytorch.callbacks, kind)()
    model = lightning_module()
    archipelago.pytorch.create(url, "own", model, steps=1000, sync=SYNC)
    connect(url, "own").reader.steer({"inner.steps": "80"})
    bars: list[Any] = []

    class Bars(lightning.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, *about: Any) -> None:
            bars.append(bar.train_progress_bar)

    made = trainer(
        ArchipelagoCallback(url, "own", steps=1000, sync=SYNC), bar, Bars(), enable_progress_bar=True, max_epochs=None
    )
    with served(url):
        made.fit(model, loader(80))
    assert made.current_epoch > 2
    assert bars[0] is bars[-1], "one for all epochs"
    shown = bars[-1].n if kind == "TQDMProgressBar" else bars[-1].completed
    assert (shown, bars[-1].total) == (80, 80)


def step_rates(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


def warm_up(optimizer: Any) -> Any:
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer, 0.1, total_iters=3), kinds.CosineAnnealingLR(optimizer, 20)]
    return kinds.SequentialLR(optimizer, parts, [3])


@pytest.mark.parametrize("schedule", [step_rates, one_cycle, warm_up])
def test_schedules_of_pytorch_follow_the_run(url: str, schedule: Any) -> None:
    callback = ArchipelagoCallback(url, "own", steps=60, sync=SYNC, final_seconds=0.1)
    model = lightning_module(schedule)
    watch = Watch(callback)
    with failing(BrokerError, "island.not-merged"):
        trainer(callback, watch, max_steps=12).fit(model, loader())
    alone = schedule(torch.optim.AdamW(model.parameters(), lr=0.01))
    rates = [alone.optimizer.param_groups[0]["lr"], *((alone.step(), alone.get_last_lr()[0])[1] for _ in range(12))]
    assert all(rate == pytest.approx(rates[step]) for step, rate in watch.seen)
    assert max(step for step, _ in watch.seen) < 12, "no merger serves the run, and its clock stands still"


def test_a_stream_that_ends_ends_the_trainer_before_the_run(url: str, caplog: pytest.LogCaptureFixture) -> None:
    class Once(torch.utils.data.IterableDataset):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.left = iter(examples(64))

        def __iter__(self) -> Any:
            return self.left

    callback = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC)
    made, model = trainer(callback), lightning_module()
    archipelago.pytorch.create(url, "own", model, steps=1000, sync=SYNC)
    with served(url):
        made.fit(model, torch.utils.data.DataLoader(Once(), batch_size=8))
    assert (made.global_step, callback.island.reason) == (8, "left")
    assert "trainer.short" in [getattr(each, "code", "") for each in caplog.records]


def test_its_validation_becomes_the_held_out_loss_of_the_run(url: str) -> None:
    model = lightning_module()
    made = trainer(ArchipelagoCallback(url, "own", steps=1000, sync=SYNC), max_steps=64, val_check_interval=16)
    archipelago.pytorch.create(url, "own", model, steps=1000, sync=SYNC)
    with served(url):
        made.fit(model, loader(), loader(32))
    transport = connect(url, "own")
    unit = loss_unit(transport.reader.manifest().corpus)
    found = [unit.from_evaluation(each.bits_per_byte) for each in transport.reader.evaluations()]
    assert found[-1] == pytest.approx(float(made.callback_metrics["val_loss"]))
    assert len(found) == 4


def test_a_checkpoint_with_more_steps_than_the_run_joins_it(url: str, tmp_path: Path) -> None:
    alone = trainer(max_epochs=-1, max_steps=30)
    alone.fit(lightning_module(), loader())
    alone.save_checkpoint(tmp_path / "alone.ckpt")
    callback, model = ArchipelagoCallback(url, "own", steps=20, sync=SYNC, island="a"), lightning_module()
    archipelago.pytorch.create(url, "own", model, steps=20, sync=SYNC)
    made = trainer(callback)
    with served(url):
        made.fit(model, loader(), ckpt_path=tmp_path / "alone.ckpt")
    assert callback.island.step >= 20
    assert made.global_step >= 50, "the steps before and those of the run"


def test_an_exception_leaves_the_run_at_once(url: str) -> None:
    class Broken(lightning.Callback):  # type: ignore[name-defined, misc]
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def on_train_batch_end(self, *about: Any) -> None:
            raise self.error

    callback = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC)
    errors = (
        (ZeroDivisionError("x"), "ZeroDivisionError: x", "left"),
        (KeyboardInterrupt(), "it was stopped", "left"),
        (SIGTERMException(), "it was stopped", "signalled"),
    )
    for error, text, reason in errors:
        with pytest.raises((ZeroDivisionError, SystemExit)):
            trainer(callback, Broken(error)).fit(lightning_module(), loader())
        assert not callback.island.is_joined
        assert callback.island.reason == reason
        assert text in connect(url, "own").reader.notes(1)[0].text


def test_bad_input_is_one_error_with_a_code(url: str) -> None:
    callback = ArchipelagoCallback(url, "own", steps=100, sync=SYNC)
    made = trainer(callback)
    made.callbacks.append(callback)
    with failing(ConfigError, "trainer.option"):
        made.fit(lightning_module(), loader())
    with failing(ConfigError, "trainer.option"):
        strategy = type("DeepSpeedStrategy", (lightning.pytorch.strategies.SingleDeviceStrategy,), {})(device="cpu")
        trainer(callback, strategy=strategy).fit(lightning_module(), loader())
    for name, options in (("EMAWeightAveraging", {}), ("StochasticWeightAveraging", {"swa_lrs": 0.1})):
        averaging = getattr(lightning.pytorch.callbacks, name)(**options)
        with failing(ConfigError, "trainer.option"):
            trainer(averaging, callback).fit(lightning_module(), loader())


def test_examples_that_cannot_be_counted_are_given(url: str) -> None:
    model = lightning_module()
    model.training_step = lambda batch, batch_idx: sum(weight.square().sum() for weight in model.parameters())
    texts = torch.utils.data.DataLoader(["a", "b", "c"], 1)
    with failing(ConfigError, "trainer.option"):
        trainer(ArchipelagoCallback(url, "own", steps=1000, sync=SYNC)).fit(model, texts)
    told = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC, tokens=5, island="told", final_seconds=0.1)
    with failing(BrokerError, "island.not-merged"):
        trainer(told, max_steps=2).fit(model, texts)
    found = {each.heartbeat.island: each.heartbeat.tokens for each in connect(url, "own").reader.presences()}
    assert found["told"] == 10
