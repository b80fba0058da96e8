"""A run in virtual time whose islands are in JAX or in PyTorch, of the same model and on the same batches.

In JAX, an island is our worker with our dense transformer; in PyTorch, a Llama of transformers with the AdamW of
PyTorch, as in docs/examples/train_llama.py. The virtual clock decides which islands lease which text, so it is the same
in either framework. Both compute in float32 on every device, where JAX would take TF32 on a GPU. So only rounding
differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, cast

import jax
import numpy as np
import torch
import transformers

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.batches import Supply
from archipelago.islands.models import llama
from archipelago.islands.models.llama import DENSE
from archipelago.islands.pytorch.host import device_name
from archipelago.islands.pytorch.module import ModuleParameters
from archipelago.islands.pytorch.replica import TorchReplica
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.participant import Participant
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.worker import Island
from archipelago.ops.experiments.baselines import scoring
from archipelago.ops.experiments.island_runs import figures, play
from archipelago.ops.experiments.trial import Progress, Trial
from archipelago.ops.experiments.virtual_time import VirtualRun, paces


class LlamaTraining:
    """The training steps of a Llama of transformers in PyTorch, with the settings of our worker's.

    Attributes:
        parameters: Its parameters by the names of our transformer.
    """

    def __init__(self, config: RunConfig, batches: Supply) -> None:
        inner, settings = config.inner, llama.config_of(
            DENSE[config.model.size], config.model.vocabulary, config.data.sequence_length, "float32"
        )  # fmt: skip
        self._inner, self._batches, self._made = inner, batches, 0
        self._model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        self.parameters = ModuleParameters(self._model, names=llama.from_llama)
        matrices = [p for p in self._model.parameters() if p.dim() > 1]
        scales = [p for p in self._model.parameters() if p.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": scales, "weight_decay": 0.0}],
            betas=(inner.beta1, inner.beta2),
        )

    def step(self, global_step: int) -> tuple[int, float]:
        """Make a training step with the learning rate of a global step. Return its tokens and its loss in nats."""
        inner = self._inner
        self._made += 1
        ramp = min(1.0, self._made / max(1, inner.moments_warmup_steps))  # of new moments, as in `islands.inner`
        for group in self._optimizer.param_groups:
            group["lr"] = inner.rate_at(global_step) * ramp
        batch = torch.from_numpy(self._batches.next(1)[0].astype(np.int64))
        loss = self._model(input_ids=batch, labels=batch).loss
        self._optimizer.zero_grad()
        loss.backward()
        if inner.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), inner.clip_norm)
        self._optimizer.step()
        return self._batches.tokens, float(loss.detach())


class TorchIsland(Participant):
    """An island that `archipelago.pytorch.join` would make, in virtual time: `boundary` and `advance` in turn."""

    training: LlamaTraining

    def advance(self) -> None:
        tokens, loss = self.training.step(self.ledger.global_step)
        self.count(1, tokens, loss)


class MixedRun(VirtualRun):
    """A run whose islands train in the frameworks of the trial, in turn. It also says which of them are slow."""

    def __init__(self, work: Workload, trial: Trial) -> None:
        self._frameworks = cycle(trial.frameworks.split())
        super().__init__(work, paces(trial.islands, trial.slow, trial.slowed))

    def new_island(
        self, name: str, work: Workload, supply: Supply, link: Link, arrivals: Sequence[Arrival], incarnation: str
    ) -> Island:
        """Return an island in the next of the frameworks."""
        if next(self._frameworks) == "jax":
            return super().new_island(name, work, supply, link, arrivals, incarnation)
        training = LlamaTraining(self.manifest.config, supply)
        parameters, device = training.parameters, training.parameters.device
        replica = TorchReplica(self.manifest, device)
        replica.begin(parameters.named(), [arrival.params_N for arrival in arrivals])
        island = TorchIsland(
            name, self.manifest, link, replica, parameters, arrivals, device_name(device), None, self.clock,
            incarnation, ranges=supply,
        )  # fmt: skip
        island.training = training
        return cast(Island, island)  # it has all that a virtual run needs


def played(trial: Trial, work: Workload, note: Progress) -> dict[str, Any]:
    """Train one of our models by islands in the trial's frameworks, and report each evaluation.

    Return the figures, or raise ConfigError (`config.value`) if they cannot train the run's model alike.
    """
    config = work.config
    if config.model.size not in DENSE or config.inner.optimizer != "adamw":
        raise ConfigError(
            f"the model {config.model.size!r} with {config.inner.optimizer} does not train alike in JAX and PyTorch",
            f"Choose one of the models {', '.join(DENSE)}, and --inner.optimizer adamw.",
            code="config.value",
        )
    torch.set_num_threads(1)  # with threads of its own, JAX and PyTorch would wait for each other's
    with jax.default_matmul_precision("float32"):
        return figures(play(MixedRun(work, trial), scoring(work), note))
