"""`archipelago bench lora`: what islands send that fine-tune a Llama with LoRA, and how well they learn.

A small Llama is trained on Python's standard library first. Then it is fine-tuned on the text of Python's manual: with
LoRA and whole, by islands in virtual time and by one process that takes the same steps on the batches of all of them.
"""

from __future__ import annotations

import importlib.util
import os
import pydoc_data.topics
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.broker.config import MergeConfig, SyncConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import NO_CORPUS, Manifest, synced
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.settings import say

RUN, NEEDED = "bench-lora", ("torch", "transformers", "peft")
SYNC = SyncConfig(interval=24, fragments=2)
BATCH, LENGTH, RANK = 8, 128, 8
#: The inner learning rates of LoRA and of the whole model, which fall to zero.
RATES = {True: 5e-3, False: 1e-3}
HELD_OUT_BATCHES = 12


@dataclass(frozen=True)
class LoraOptions(OutputOptions):
    """Fine-tune a small Llama by islands, with LoRA and whole, beside one process on the same tokens."""

    islands: int = 3
    """The number of islands."""
    steps: int = 192
    """The inner steps of each island."""
    first_steps: int = 600
    """The steps on the first text."""
    width: int = 64
    """The width of the Llama, which has three layers."""


def main(options: LoraOptions) -> int:
    """Measure, and write the results."""
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} cannot be imported",
            'This measurement needs them: pip install "archipelago-train[torch]" transformers peft',
            code="bench.lora",
        )
    return finish("lora", measured(options), options)


def measured(options: LoraOptions) -> dict[str, Any]:
    """Train and fine-tune. Return plain data with `rows`; losses are nats a byte on text that is held out."""
    import torch

    torch.set_num_threads(1)  # on a busy machine, threads wait for each other longer than such small matrices take
    code, manual = _code(), "\n".join(pydoc_data.topics.topics.values()).encode()
    cut = len(manual) * 9 // 10
    base = _base(options.width)
    _train([base], [code], options.first_steps, 1e-3)
    before = _loss(base, manual[cut:])
    say(f"before fine-tuning: {before:.4f}")
    weights, rows = base.state_dict(), []
    for is_lora in (True, False):
        name = "LoRA" if is_lora else "whole model"
        alone = _model(options.width, weights, is_lora)
        _train([alone], [manual[:cut]], options.steps, RATES[is_lora], options.islands)
        rows.append({"what": f"{name}, one process", "held_out": _loss(alone, manual[cut:])} | _NOTHING_SENT)
        for rule in ("isotropic", "average") if is_lora else ("isotropic",):
            models = [_model(options.width, weights, is_lora) for _ in range(options.islands)]
            sent = _islands(models, manual[:cut], options.steps, RATES[is_lora], rule)
            loss = _loss(models[0], manual[cut:])
            rows.append({"what": f"{name}, {options.islands} islands, {rule}", "held_out": loss} | sent)
            say(f"{rows[-1]['what']}: {loss:.4f}")
    parameters = sum(tensor.numel() for tensor in base.parameters())
    return {"before": before, "parameters": parameters, "batch": BATCH, "length": LENGTH, "rank": RANK,
            "islands": options.islands, "steps": options.steps, "rows": rows}  # fmt: skip


_NOTHING_SENT = {"trained": 0, "bytes_a_sync": 0, "bytes_up": 0}


# -- the model and its text ------------------------------------------------------------------------------------------


def _base(width: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=3,
                    num_attention_heads=4, tie_word_embeddings=True)
    )  # fmt: skip


def _model(width: int, weights: Any, is_lora: bool) -> Any:
    """Return a Llama of these weights, with adapters for all linear layers or without."""
    import torch

    base = _base(width)
    base.load_state_dict(weights)
    if not is_lora:
        return base
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a name that transformers will change
        return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))


def _code() -> bytes:
    """Return the code of Python's standard library, without its folders."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"\n".join(path.read_bytes() for path in files)


def _batches(text: bytes, seed: int) -> Iterator[Any]:
    """Yield batches of bytes [BATCH, LENGTH]."""
    import torch

    found, chosen = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(found) - LENGTH, (BATCH, 1), generator=chosen)
        yield found[starts + torch.arange(LENGTH)]


def _loss(model: Any, text: bytes) -> float:
    import torch

    batches = _batches(text, 1_000)
    with torch.no_grad():
        losses = [float(_loss_of(model, next(batches))) for _ in range(HELD_OUT_BATCHES)]
    return statistics.fmean(losses)


def _loss_of(model: Any, batch: Any) -> Any:
    return model(input_ids=batch, labels=batch).loss


# -- training --------------------------------------------------------------------------------------------------------


class _Trainer:
    """The loop of one process or island. Its batches are those of `count` islands, beginning with number `first`."""

    def __init__(self, model: Any, text: bytes, rate: float, steps: int, first: int = 0, count: int = 1) -> None:
        import torch

        self.model = model
        self._optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.0, steps)
        self._batches = [_batches(text, first + number) for number in range(count)]

    def step(self, global_step: int = 0) -> tuple[int, float]:
        """Make a step of the schedule of its own, whatever the global step. Return its tokens and loss."""
        import torch

        loss = _loss_of(self.model, torch.cat([next(batches) for batches in self._batches]))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        return BATCH * LENGTH, float(loss.detach())


def _train(models: Sequence[Any], texts: Sequence[bytes], steps: int, rate: float, count: int = 1) -> None:
    for model, text in zip(models, texts, strict=True):
        trainer = _Trainer(model, text, rate, steps, count=count)
        for _ in range(steps):
            trainer.step()


def _islands(models: Sequence[Any], text: bytes, steps: int, rate: float, rule: Any) -> dict[str, Any]:
    """Fine-tune by islands that take their steps in turns. Return what was sent. The first model ends as the run's."""
    from archipelago.islands.own_loop.new_run import first_snapshots, settings
    from archipelago.islands.own_loop.tensors import kinds_by
    from archipelago.islands.pytorch.module import ModuleParameters
    from archipelago.islands.sync.connection.link import Link
    from archipelago.merger.service import Merger
    from archipelago.ops.experiments.both_frameworks import TorchIsland
    from archipelago.ops.experiments.virtual_time import VirtualClock

    merge = MergeConfig(rest=rule, embedding=rule)
    config = settings(steps, SYNC, merge, None, None, None, record=False)
    parameters = [ModuleParameters(model) for model in models]
    tensors, fragments = synced(parameters[0].manifest_tensors(kinds_by("embed")), config)
    frozen = tuple(values.named() for values in parameters[0].frozen_values())
    manifest = Manifest(RUN, config, tensors, fragments, NO_CORPUS, {}, frozen=frozen)
    clock = VirtualClock()
    broker, named = MemoryBroker(clock), parameters[0].named()
    first = {name: tensor.detach().float().reshape(-1).numpy().copy() for name, tensor in named.items()}
    broker.connect(RUN).create(manifest, first_snapshots(manifest, first.__getitem__))
    merger = Merger(broker.connect(RUN), clock, holder="merger", live_poll_seconds=0.0)
    merger.acquire()
    merger.load()
    count = len(models)
    islands = []
    for number, (each, each_model) in enumerate(zip(parameters, models, strict=True)):
        name, trainer = f"island-{number}", _Trainer(each_model, text, rate, steps, number)
        link = Link(broker.connect(RUN), manifest, f"{name}/x", (), clock)
        islands.append(TorchIsland(name, manifest, each, trainer.step, link, link.join(), clock, "x"))
        islands[-1].begin()
    for step in range(steps + 1):
        clock.now += 1.0
        for island in islands:
            island.link.pump()
            island.boundary()
            island.link.pump()
            if step < steps:
                island.advance()
        merger.turn(0.0)
    # The first model adopts what was merged, so that it is the run's but for steps that were not merged.
    islands[0].link.pump()
    islands[0].boundary()
    books = broker.connect(RUN).reader.books()
    syncs = books.published / len(manifest.fragments)
    return {"trained": manifest.parameters, "bytes_a_sync": round(books.bytes_up / syncs),
            "bytes_up": round(books.bytes_up / count)}  # fmt: skip
