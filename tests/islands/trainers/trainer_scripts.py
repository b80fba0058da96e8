"""A script of each kind that trains one small model.

The arguments are its kind, the URL, the run, the island and the steps. With the variables of `torchrun`, several
processes are one island.

All kinds train the same tensors on the same data, so that they can share a run. A script ends by printing what its
trainer knows, as JSON. Several processes then train the run `NAME-split` too, with a model that FSDP2 splits.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import archipelago
from archipelago import SyncConfig

SYNC = SyncConfig(interval=8, fragments=2)
#: The end of the name of a run that FSDP2 trains, and its length.
SPLIT, SPLIT_STEPS = "-split", 48
#: How long a script rests after each forward pass. Without it, scripts that train take all cores from other tests.
REST_SECONDS = 0.05 if __name__ == "__main__" else 0.0
TEACHER = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Network(torch.nn.Module):  # type: ignore[misc]  # torch is optional
    """A small classifier. With labels it returns a loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        build(self)

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        time.sleep(REST_SECONDS)
        logits = self.output(self.hidden(inputs).relu())
        if labels is None:
            return logits
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def build(module: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module.hidden, module.output = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)


def examples(count: int = 512) -> list[dict[str, Any]]:
    inputs = torch.randn(count, 8)
    return [{"inputs": each, "labels": label} for each, label in zip(inputs, (inputs @ TEACHER).argmax(1), strict=True)]


def loader(count: int = 512) -> Any:
    return torch.utils.data.DataLoader(examples(count), batch_size=8, shuffle=True)


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def overflowing(model: Any) -> Any:
    """Make the gradients of the seventh batch infinite, and return the scaler that skips its step."""
    batches = itertools.count(1)
    model.output.bias.register_hook(lambda gradient: gradient + (math.inf if next(batches) == 7 else 0))
    return torch.amp.GradScaler("cpu", init_scale=1.0)


def splits(accelerator: Any, run: str) -> bool:
    """Let accelerate split the models by FSDP2, which it does not by itself on CPUs. Return whether the run asks it."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    if run.endswith(SPLIT):
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return run.endswith(SPLIT)


def transformers(url: str, run: str, island: str, steps: int, *callbacks: Any) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    from archipelago.transformers import ArchipelagoCallback

    callback = ArchipelagoCallback(url, run, steps=steps, sync=SYNC, island=island)
    args = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, learning_rate=1e-2, report_to="none", save_strategy="no",
        use_cpu=True, logging_steps=10,
    )  # fmt: skip
    trainer = Trainer(Network(), args, train_dataset=examples(), callbacks=[callback, *callbacks])
    trainer.is_fsdp_enabled = splits(trainer.accelerator, run)
    trainer.train()
    return {"own steps": trainer.state.global_step, "weights": weights(trainer.model, run)}


def lightning_module(schedule: Any = None) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            build(self)
            self.compute = partial(Network.forward, self)

        def configure_model(self) -> None:
            for layer in (self.hidden, self.output) if self.device_mesh else ():
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, number: int) -> Any:
            return self.compute(**batch)["loss"]

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.compute(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            if schedule is None:
                return optimizer
            return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    return Module()


def lightning(url: str, run: str, island: str, steps: int) -> dict[str, Any]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from archipelago.lightning import ArchipelagoCallback

    callback = ArchipelagoCallback(url, run, steps=steps, sync=SYNC, island=island)
    split = ModelParallelStrategy(data_parallel_size=processes(), tensor_parallel_size=1)
    trainer = Trainer(
        callbacks=[callback], accelerator="cpu", devices=processes(), max_epochs=1,
        strategy=split if run.endswith(SPLIT) else "auto",
        logger=False, enable_checkpointing=False, enable_model_summary=False, default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    model = lightning_module()
    trainer.fit(model, loader())
    return {"own steps": trainer.global_step, "weights": weights(model, run)}


def accelerate(url: str, run: str, island: str, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator

    from archipelago.accelerate import LocalSGD

    accelerator = Accelerator(cpu=True)
    splits(accelerator, run)
    model = Network()
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader())
    local: Any = LocalSGD(accelerator, model, url=url, name=run, steps=steps, sync=SYNC, island=island)
    with local:
        while not local.finished:
            for batch in data:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step(loss=loss)
                if local.finished:
                    break
    return {"weights": weights(accelerator.unwrap_model(model), run)}


def plain(url: str, run: str, island: str, steps: int) -> dict[str, Any]:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    archipelago.pytorch.create(url, run, model, steps=steps, sync=SYNC)
    joined: Any = archipelago.pytorch.join(url, run, model, optimizer, island=island)
    with joined:
        while not joined.finished:
            for batch in loader():
                loss = model(**batch)["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                joined.sync(tokens=8, loss=loss)
                if joined.finished:
                    break
    joined.final(60)
    return {"weights": weights(model, run)}


def broken(url: str, run: str, island: str, steps: int) -> dict[str, Any]:
    from transformers import TrainerCallback

    class Broken(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
            if state.global_step == 20:
                raise ZeroDivisionError("a bad step")

    return transformers(url, run, island, steps, Broken())


def weights(model: Any, run: str) -> dict[str, float]:
    whole = {name: each.full_tensor() if run.endswith(SPLIT) else each for name, each in model.named_parameters()}
    return {name: float(each.detach().double().sum()) for name, each in whole.items()}


KINDS = {each.__name__: each for each in (transformers, lightning, accelerate, plain, broken)}


if __name__ == "__main__":
    kind, url, run, island, steps = sys.argv[1:]
    torch.set_num_threads(1)
    found = KINDS[kind](url, run, island, int(steps))
    if processes() > 1:
        found["split"] = KINDS[kind](url, run + SPLIT, island, SPLIT_STEPS)["weights"]
    print(json.dumps(found), flush=True)  # noqa: T201
