"""The callback of Hugging Face `Trainer`, with the real package."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.broker.errors import BrokerError, ConfigError, MismatchError, UnknownRunError, UnreachableError
from archipelago.broker.observe.losses import loss_unit
from archipelago.broker.redis.transport import connect
from tests import pytorch
from tests.failing import failing
from tests.islands.user_loop.any_framework import merged_by, served

torch = pytorch.required()
transformers = pytorch.required("transformers")
pytorch.required("accelerate")

from archipelago.transformers import ArchipelagoCallback  # noqa: E402 - it imports transformers
from tests.islands.trainers.trainer_scripts import Network, examples, overflowing  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

SYNC = SyncConfig(interval=4, fragments=2)


def trainer(callbacks: Any, model: Any = None, **options: Any) -> Any:
    asked = {"per_device_train_batch_size": 8, "report_to": "none", "save_strategy": "no", "use_cpu": True, **options}
    args = transformers.TrainingArguments("out", learning_rate=0.01, **asked)
    return transformers.Trainer(model or Network(), args, train_dataset=examples(64), callbacks=callbacks)


class Watch(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    """Notes what the trainer does at each step, after the callback before it."""

    def __init__(self, run: ArchipelagoCallback, stop_after: int = 0) -> None:
        self.island, self.rates, self.clock, self.stop_after = run.island, [], [], stop_after  # type: ignore[var-annotated]

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        self.clock.append(self.island.step)
        self.rates.append(about["optimizer"].param_groups[0]["lr"])
        if state.global_step == self.stop_after:
            raise ZeroDivisionError


class Evaluated(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    """Asks for an evaluation at each second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        control.should_evaluate = state.global_step % 2 == 0


def test_a_trainer_trains_until_the_run_ends_on_its_clock(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    callback = ArchipelagoCallback(url, "own", steps=120, sync=SYNC, island="a")
    watch = Watch(callback)
    made = trainer(
        [callback, watch], gradient_accumulation_steps=2, warmup_steps=0.1, logging_steps=7, num_train_epochs=1
    )
    made.accelerator.scaler = overflowing(made.model)
    archipelago.pytorch.create(url, "own", Network(), steps=120, sync=SYNC)
    with served(url) as merger:
        made.train()
        merged = merged_by(merger)
    assert made.state.global_step == len(watch.clock) >= 120, "epochs do not end it"
    assert watch.clock[-1] == callback.island.steps == 120
    for clock, rate in zip(watch.clock, watch.rates, strict=True):
        assert rate == pytest.approx(0.01 * (min(1.0, clock / 12) if clock < 12 else (120 - clock) / 108))
    assert len(set(watch.clock)) > 3
    logged = [each["step"] for each in made.state.log_history if "loss" in each]
    assert logged == [*range(7, made.state.global_step + 1, 7)], "figures are those of the trainer's own steps"
    (tokens,) = {each.heartbeat.tokens for each in connect(url, "own").reader.presences()}
    assert tokens == (made.state.global_step - 1) * 16, "the scaler skipped one step"
    assert "120/120" in capfd.readouterr().err, "the bar"
    for name, tensor in made.model.named_parameters():
        torch.testing.assert_close(tensor.detach(), torch.from_numpy(merged[name]), rtol=0, atol=0)


def test_data_without_a_length_is_read_in_passes_until_the_run_ends(url: str) -> None:
    class Passes(torch.utils.data.IterableDataset):  # type: ignore[name-defined, misc]
        count = 0

        def __iter__(self) -> Any:
            Passes.count += 1
            return iter(examples(64))

    callback = ArchipelagoCallback(url, "own", steps=20, sync=SYNC)
    made = trainer([callback], max_steps=20)
    made.train_dataset = Passes()
    ArchipelagoCallback(url, "own", steps=20).on_init_end(made.args, made.state, made.control, lr_scheduler=None)
    assert made.args.max_steps <= 100_000, "the trainer counts up to it after each pass"
    archipelago.pytorch.create(url, "own", Network(), steps=20, sync=SYNC)
    with served(url):
        made.train()
    assert Passes.count >= 3
    assert callback.island.reason == "completed"


def test_its_bar_follows_a_run_whose_length_is_steered(url: str) -> None:
    callback = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC)
    made = trainer([callback], disable_tqdm=False)
    archipelago.pytorch.create(url, "own", Network(), steps=1000, sync=SYNC)
    connect(url, "own").reader.steer({"inner.steps": "40"})
    bar = next(each for each in made.callback_handler.callbacks if isinstance(each, transformers.ProgressCallback))
    bars = []

    class Bars(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, *about: Any, **more: Any) -> None:
            bars.append(bar.training_bar)

    made.add_callback(Bars())
    with served(url):
        made.train()
    assert (bars[-1].n, bars[-1].total) == (40, 40)


@pytest.mark.parametrize(("monitor", "prefix"), [({}, "eval"), ({"monitor": "eval_b_loss"}, "eval_b")])
def test_its_evaluations_become_the_held_out_losses_of_the_run(
    url: str, monitor: Any, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC, **monitor)
    made = trainer([callback, Evaluated()], max_steps=6)
    made.eval_dataset = {"a": examples(8), "b": examples(16)} if monitor else examples(16)
    archipelago.pytorch.create(url, "own", Network(), steps=1000, sync=SYNC)
    with served(url):
        made.train()
    made.evaluate()
    callback.on_evaluate(made.args, made.state, made.control, {f"{prefix}_loss": math.nan})
    assert getattr(caplog.records[-1], "code", "") == "loop.argument", "a loss that is no number ends no training"
    found = [each[f"{prefix}_loss"] for each in made.state.log_history if f"{prefix}_loss" in each]
    transport = connect(url, "own")
    unit = loss_unit(transport.reader.manifest().corpus)
    assert found
    assert [unit.from_evaluation(each.bits_per_byte) for each in transport.reader.evaluations()] == pytest.approx(found)


def test_an_island_that_ends_before_the_run_says_so_and_leaves(url: str, caplog: pytest.LogCaptureFixture) -> None:
    callback = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC, tokens=5, final_seconds=0.1)
    made = trainer([callback], max_steps=3)
    with failing(BrokerError, "island.not-merged"):
        made.train()
    assert made.state.global_step == 3
    assert codes(caplog) == ["trainer.short"]
    (beat,) = connect(url, "own").reader.presences()
    assert (beat.heartbeat.state, beat.heartbeat.tokens) == ("left", 15)
    late = trainer([], num_train_epochs=1)
    late.add_callback(ArchipelagoCallback(url, "own"))
    with served(url):
        late.train()
    assert late.state.global_step == 8, "one epoch"
    assert codes(caplog) == ["trainer.short"] * 2


def test_an_exception_leaves_the_run_when_another_training_for_it_begins(url: str) -> None:
    def begun(stop_after: int) -> Any:
        callback = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC, island="a")
        return trainer([callback, Watch(callback, stop_after)], max_steps=6)

    made = begun(stop_after=4)
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert states(url) == ["training"]
    before, made = weakref.ref(made.model), begun(stop_after=0)
    with served(url):
        made.train()
    gc.collect()
    assert before() is None, "the first model is not kept"
    assert states(url) == ["left"]
    notes = [note.text for note in connect(url, "own").reader.notes(9) if note.kind == "left"]
    assert sorted("another training began" in note for note in notes) == [False, True]


def test_a_checkpoint_of_the_trainer_gives_way_to_the_run(url: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer([], **options).train()
    callback = ArchipelagoCallback(url, "own", steps=1000, sync=SYNC)
    first = Network()
    archipelago.pytorch.create(url, "own", first, steps=1000, sync=SYNC)

    class Seen(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
            for own, run in zip(about["model"].parameters(), first.parameters(), strict=True):
                torch.testing.assert_close(own, run)

    with served(url):
        trainer([callback, Seen()], **options).train(resume_from_checkpoint="out/checkpoint-2")
    assert "trainer.resumed" in codes(caplog)
    assert callback.island._run.optimizer_origin == "the script's own"


def test_adapters_are_trained_and_the_base_is_compared(url: str) -> None:
    peft = pytorch.required("peft")

    def adapted(seed: int) -> Any:
        torch.manual_seed(seed)
        config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        return peft.get_peft_model(
            transformers.GPT2LMHeadModel(config), peft.LoraConfig(r=2, target_modules=["c_attn"])
        )

    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32
    archipelago.pytorch.create(url, "own", adapted(0), steps=1000, sync=SYNC)
    made = trainer([ArchipelagoCallback(url, "own", steps=1000, sync=SYNC)], adapted(0), max_steps=2)
    made.train_dataset = data
    with served(url):
        made.train()
    manifest = connect(url, "own").reader.manifest()
    assert all("lora" in tensor.name for tensor in manifest.tensors)
    other = trainer([ArchipelagoCallback(url, "own", steps=1000, sync=SYNC)], adapted(1), max_steps=2)
    other.train_dataset = data
    with failing(MismatchError, "loop.other-frozen"):
        other.train()


def test_bad_input_is_one_error_with_a_code(url: str) -> None:
    callback = ArchipelagoCallback(url, "own", steps=100, sync=SYNC)
    with pytest.raises(TypeError, match="stepps"):  # where it is written, and not when training begins
        ArchipelagoCallback(url, "own", stepps=100)
    archipelago.pytorch.create(url, "own", Network(), steps=100, sync=SYNC)
    best: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    with failing(ConfigError, "trainer.option"):
        args = transformers.TrainingArguments("out", report_to="none", **best)
        transformers.Trainer(Network(), args, train_dataset=examples(8), eval_dataset=examples(8), callbacks=[callback])
    late = transformers.Trainer(Network(), args, train_dataset=examples(8), eval_dataset=examples(8))
    late.add_callback(callback)
    with failing(ConfigError, "trainer.option"):
        late.train()

    args = transformers.TrainingArguments("out", report_to="none")
    args.use_vllm, adapted = True, Network()
    adapted.peft_config = {}
    with failing(ConfigError, "trainer.option"):
        transformers.Trainer(adapted, args, train_dataset=examples(8), callbacks=[callback]).train()

    class Inner(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, *about: Any, **more: Any) -> None:
            trainer([callback], max_steps=1).train()

    with served(url), failing(ConfigError, "trainer.option"):
        trainer([callback, Inner()]).train()
    for several in ([callback, callback], [callback, ArchipelagoCallback(url, "own", steps=100, sync=SYNC)]):
        with failing(ConfigError, "trainer.option"):
            trainer(several).train()
    with failing(MismatchError, "loop.other-tensors"):
        trainer([ArchipelagoCallback(url, "own", steps=100, sync=SYNC)], torch.nn.Linear(2, 2)).train()
    with failing(ConfigError, "loop.sharded"):
        spread = Network()
        spread.hf_device_map = {"hidden": "cpu", "output": "disk"}
        trainer([ArchipelagoCallback(url, "new", steps=100, sync=SYNC)], spread).train()
    wrong: Any = "20"
    with failing(ConfigError, "config.value"):
        ArchipelagoCallback(url, "own", steps=wrong)
    with failing(UnknownRunError, "broker.unknown-run"):
        trainer([ArchipelagoCallback(url, "none")]).train()
    with failing(UnreachableError, "broker.unreachable"):
        trainer([ArchipelagoCallback("redis://127.0.0.1:1", "own", steps=5, wait_seconds=0.0)]).train()


def codes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [code for record in caplog.records if (code := getattr(record, "code", "")).startswith("trainer.")]


def states(url: str) -> list[str]:
    return [each.heartbeat.state for each in connect(url, "own").reader.presences()]
