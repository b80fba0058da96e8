"""`bench mixed`: its table worked out by hand, and short runs of both frameworks on the same batches."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.inner import begin
from archipelago.islands.models.registry import build
from archipelago.ops.experiments import mixed
from archipelago.ops.experiments.mixed import BOTH, JAX, TORCH, frameworks, rows
from archipelago.ops.experiments.parity import Arm
from archipelago.ops.experiments.trial import CurvePoint
from tests import pytorch
from tests.failing import failing
from tests.small import SMALL, compiled


def test_the_table() -> None:
    losses = {JAX: (2.0, 4.0), TORCH: (1.0, 4.0), BOTH: (3.0, 2.0)}
    arms = {name: Arm(name, 2, tuple([CurvePoint(10, loss)] for loss in each)) for name, each in losses.items()}
    one, other, both = rows(arms)
    assert (one["to_jax"], other["to_jax"], both["to_jax"]) == (1.0, 0.75, 1.0)
    assert (one["to_pytorch"], other["to_pytorch"], both["to_pytorch"]) == (1.5, 1.0, 1.75)
    assert (both["bits_per_byte"], both["spread"]) == (2.5, pytest.approx(0.5**0.5))


def test_every_second_island_of_the_mixed_run_is_in_pytorch() -> None:
    assert frameworks(3) == {JAX: ["jax"] * 3, TORCH: ["pytorch"] * 3, BOTH: ["jax", "pytorch", "jax"]}


@pytest.mark.full
def test_short_runs_end_alike(corpus: OpenCorpus) -> None:
    pytorch.required("transformers")
    with failing(ConfigError, "bench.not-in-both"):
        no_llama = dataclasses.replace(SMALL.model, size="tiny-moe")
        mixed.compared(RunConfig(model=no_llama), corpus, 2, (0,))
    averaged = dataclasses.replace(SMALL, merge=MergeConfig("average", "average"))  # little to compile
    found = mixed.compared(averaged, corpus, 2, (3,))
    json.dumps(found)
    one, other, both = found["rows"]
    assert one["tokens"] == other["tokens"] == both["tokens"] > 0
    # Only rounding differs, which the merges amplify. Without clipping, the loss would be 1 % higher.
    assert both["to_jax"] == pytest.approx(1.0, abs=0.005)
    assert both["to_pytorch"] == pytest.approx(1.0, abs=0.005)
    first, *_, last = (loss for _, loss in found["curves"][BOTH][0])
    assert last < 0.8 * first


@pytest.mark.full
def test_a_llama_makes_the_steps_of_our_worker(corpus: OpenCorpus) -> None:
    torch = pytorch.required()
    pytorch.required("transformers")
    from archipelago.ops.experiments.both_frameworks import LlamaTraining, SeededBatches

    def batches() -> SeededBatches:
        return SeededBatches(corpus.train, SMALL, lambda: None, 1)

    training, first = LlamaTraining(SMALL, batches()), build(SMALL.model).init(0)
    named = training.parameters.named()
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(torch.tensor(np.asarray(first[name])))
    made = [training.step(step) for step in range(8)]
    state = begin(SMALL.inner, first)
    tokens = batches().next(8)
    state, losses = compiled(SMALL)(state, jnp.asarray(tokens), jnp.int32(0))
    assert [loss for _, loss in made] == pytest.approx(np.asarray(losses).tolist(), rel=1e-5)
    assert sum(count for count, _ in made) == tokens[..., 1:].size
    for name, tensor in named.items():
        np.testing.assert_allclose(tensor.detach().numpy(), np.asarray(state.params[name]), atol=1e-5, err_msg=name)
