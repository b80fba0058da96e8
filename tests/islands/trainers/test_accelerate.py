"""`LocalSGD` in place of accelerate's, with the real package."""

from __future__ import annotations

from typing import Any

import pytest

import archipelago
from archipelago import SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError
from archipelago.broker.redis.transport import connect
from tests import pytorch
from tests.failing import failing
from tests.islands.user_loop.any_framework import merged_by, served

torch = pytorch.required()
accelerate = pytorch.required("accelerate")

from archipelago.accelerate import LocalSGD  # noqa: E402 - it imports accelerate
from tests.islands.trainers.trainer_scripts import Network, loader, overflowing  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


def prepared(**options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = Network()
    accelerator.scaler = overflowing(model)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader())


def trained(local: Any, accelerator: Any, model: Any, optimizer: Any, data: Any) -> None:
    """Train an epoch as the examples of accelerate do."""
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()


def test_one_import_makes_a_loop_an_island(url: str) -> None:
    accelerator, model, optimizer, data = prepared(gradient_accumulation_steps=2)
    archipelago.pytorch.create(url, "own", model, steps=100, sync=SyncConfig(interval=4, fragments=2))
    with served(url) as merger:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
            epochs = 0
            while not local.finished:
                trained(local, accelerator, model, optimizer, data)
                epochs += 1
        merged = merged_by(merger)
    assert local.island.step == local.island.steps == 100
    (beat,) = [each.heartbeat for each in connect(url, "own").reader.presences()]
    assert beat.tokens == (epochs * 32 - 1) * 16, "once for two batches, but for the step that the scaler skipped"
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.detach(), torch.from_numpy(merged[name]), rtol=0, atol=0)


def test_prepared_schedules_follow_the_run(url: str) -> None:
    accelerator, model, optimizer, data = prepared()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 - step / 50)
    schedule, seen = accelerator.prepare(schedule), set()
    archipelago.pytorch.create(url, "own", model, steps=50, sync=SyncConfig(interval=4, fragments=2))
    local: Any = LocalSGD(accelerator, model)
    with served(url), local:
        while not local.finished:
            for batch in data:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                schedule.step()
                local.step()
                seen.add((local.island.step, optimizer.param_groups[0]["lr"]))
                if local.finished:
                    break
    assert max(seen)[0] == 50
    assert all(rate == pytest.approx(0.01 * (1 - step / 50)) for step, rate in seen)


def test_it_creates_a_run_if_it_knows_the_length(url: str, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, optimizer, data = prepared()
    with failing(UnknownRunError, "broker.unknown-run"), LocalSGD(accelerator, model, 4):
        pass
    local: Any = LocalSGD(accelerator, model, 4, enabled=False, steps=100)
    for _ in range(2):
        with local:
            assert not local.finished
            trained(local, accelerator, model, optimizer, data)
            assert not local.finished, "64 steps of 100"
            trained(local, accelerator, model, optimizer, data)
            assert local.finished, "alone, it trains for as many steps as the run would have"
    wire = WireConfig(up="float32", thin="", down="float32")
    local = LocalSGD(accelerator, model, 12, steps=1000, final_seconds=0.1, wire=wire)
    with failing(BrokerError, "island.not-merged"), local:
        trained(local, accelerator, model, optimizer, data)
    assert "trainer.short" in {getattr(record, "code", "") for record in caplog.records}
    with served(url):
        local.island.final(60.0)
    assert connect(url, "own").reader.manifest().config.sync.interval == 12


def test_deepspeed_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, *_ = prepared()
    monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.DEEPSPEED)
    with failing(ConfigError, "trainer.option"):
        LocalSGD(accelerator, model, 8)
