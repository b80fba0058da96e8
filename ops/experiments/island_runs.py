"""Play runs of islands in virtual time to their end, and evaluate their merged parameters. Some may be hostile.

A hostile island follows the protocol: it joins, adopts snapshots and answers every round. Only what it sends is wrong,
or the labels on which it trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from archipelago.broker.codecs import Vector
from archipelago.broker.config import ModelConfig
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution
from archipelago.broker.transport import IslandClient, IslandTransport
from archipelago.broker.wire import digest, pack, unpack
from archipelago.islands.evaluation import published
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.registry import build
from archipelago.islands.tasks.ours import OurTask, our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments.baselines import evaluations, scoring
from archipelago.ops.experiments.trial import CurvePoint, Progress, Trial
from archipelago.ops.experiments.virtual_time import ChangedTransport, VirtualRun, are_slow, paces


class HostileRun(VirtualRun):
    """A run in which hostile islands replace what they send. `attacks` names the attack of each, by its name."""

    def __init__(self, attacks: Mapping[str, str], *args: Any, **named: Any) -> None:
        self._attacks = attacks
        self._public: Public = {}
        super().__init__(*args, **named)

    def connect_island(self, name: str) -> IslandTransport:
        transport = super().connect_island(name)
        if not self._attacks:
            return transport
        attack = self._attacks.get(name, "")
        client = HostileClient(transport.island, self.manifest, attack, self._born, self._public)
        return ChangedTransport(transport.run, cast(IslandClient, client), transport.reader)


def islands(work: Workload, trial: Trial, progress: Progress) -> VirtualRun:
    """Play a run of islands to its end, and report each evaluation. Return the finished run.

    The trial says how many islands there are, and which of them are slow, late, hostile, or read other text.
    """
    count = trial.islands
    seconds = paces(count, trial.slow, trial.slowed)
    on_the_way = [trial.sending * is_slow for is_slow in are_slow(count, trial.slowed)]
    # The slowest islands have seen what the others send before they answer a round.
    first = count - trial.hostile if trial.attack in LITTLE else 0
    attacks = {f"island-{first + number}": trial.attack for number in range(trial.hostile)}
    others = {f"island-{number}": part_of(work, number, count) for number in range(count if trial.apart else 0)}
    if trial.attack == "labels":
        others |= {name: wrong_labels(others.get(name, work)) for name in attacks}
    run = HostileRun(attacks, work, seconds, sending_seconds=on_the_way, others=others)
    return play(run, scoring(work), progress, hostile=attacks)


def play(
    run: VirtualRun,
    point: Callable[[int, Params], CurvePoint],
    progress: Progress,
    hostile: Collection[str] = (),
) -> VirtualRun:
    """Play a run to its end, and report evaluations of its merged parameters over the tokens of all honest islands.

    `point` evaluates parameters (`baselines.scoring`). `hostile` has the names of islands whose tokens do not count.
    """
    config = run.manifest.config
    honest = [island for name, island in run.islands.items() if name not in hostile]

    def note(share: float) -> None:
        tokens = sum(island.totals.tokens for island in honest)  # also of those that have left
        progress(dataclasses.replace(point(tokens, published(run.transport, run.manifest)[0]), share=share))

    note(0.0)
    marks = evaluations(config)
    for mark in range(1, marks):
        due = config.inner.steps * mark // marks
        run.advance_until(lambda due=due: run.merger.state.step >= due)  # type: ignore[misc]
        note(mark / marks)
    run.finish()
    note(1.0)
    return run


def part_of(work: Workload, number: int, of: int) -> Workload:
    """Return one of our models on a part of its text, cut into `of` parts."""
    assert isinstance(work.named, OurTask)  # noqa: S101 - studies train our models
    corpus = work.named.corpus
    length = len(corpus.train) // of
    part = dataclasses.replace(corpus, train=corpus.train[number * length : (number + 1) * length])
    return our_work(work.config, part)


def figures(run: VirtualRun) -> dict[str, Any]:
    """Return the number of rounds, the mean of the contributions of a round, and the mean and maximum staleness."""
    rounds = [entry.members for entry in run.transport.reader.tape(1 << 30)]
    stale = [member.staleness for members in rounds for member in members]
    return {
        "rounds": len(rounds),
        "per_round": round(len(stale) / max(1, len(rounds)), 4),
        "staleness": round(sum(stale) / max(1, len(stale)), 4),
        "staleness_max": max(stale, default=0),
    }


# -- hostile islands --------------------------------------------------------------------------------------------------

#: From a fragment's outer gradient, its tensors' lengths and random numbers to what the island sends.
Forgery = Callable[[Vector, list[int], np.random.Generator], Vector]
#: The `little` attacks multiply their tokens by this. A merger admits batches that are this much larger than usual.
CLAIMED = 64
#: How many standard deviations the `little` attacks stay below the mean of what honest islands have published.
LITTLE = {"little-0.6": 0.6, "little-1.0": 1.0, "little-1.5": 1.5}
#: What honest islands have published last, by fragment and island. Every island can read it in Redis.
Public = dict[int, dict[str, Vector]]


def _noise(delta_N: Vector, lengths: list[int], random: np.random.Generator) -> Vector:
    """Return noise in which every tensor has the norm that it had."""
    out = random.standard_normal(delta_N.size, np.float32)
    at = 0
    for length in lengths:
        part = slice(at, at + length)
        out[part] *= np.linalg.norm(delta_N[part]) / max(1e-30, float(np.linalg.norm(out[part])))
        at += length
    return out


def _collude(delta_N: Vector, lengths: list[int], random: np.random.Generator) -> Vector:
    """Return the same noise for every island, so that hostile islands agree with each other more than honest ones."""
    return _noise(delta_N, lengths, np.random.default_rng(1))


#: What an island sends by the name of the attack, apart from LITTLE. `labels` trains on wrong labels instead
#: (`wrong_labels`). `stale` claims a base that is two versions older.
FORGERIES: dict[str, Forgery] = {
    "flip": lambda delta_N, lengths, random: -delta_N,
    "noise": _noise,
    "scale": lambda delta_N, lengths, random: 3 * delta_N,
    "collude": _collude,
    "labels": lambda delta_N, lengths, random: delta_N,
    "stale": lambda delta_N, lengths, random: -delta_N,
}


class HostileClient:
    """An island's client that replaces each contribution by a forgery.

    `attack` is a name of FORGERIES or LITTLE. An honest island has none, and its contributions are noted in `public`.
    """

    def __init__(self, client: IslandClient, manifest: Manifest, attack: str, seed: int, public: Public) -> None:
        self._client, self._manifest, self._attack, self._public = client, manifest, attack, public
        self._random = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        """Publish the forgery, with a header that fits it."""
        p, codec, header = contribution.fragment, contribution.codec, contribution
        delta_N = unpack(payload, self._manifest.sizes[p], codec)
        if not self._attack:
            self._public.setdefault(p, {})[contribution.island] = delta_N
            return self._client.publish(contribution, payload)
        if self._attack in LITTLE:
            # The deviation is taken element by element. Before anybody has published, an island sends its own work.
            others_MxN = np.stack(list(self._public.get(p, {"": delta_N}).values()))
            forged_N = others_MxN.mean(axis=0) - LITTLE[self._attack] * others_MxN.std(axis=0)
            header = dataclasses.replace(header, tokens=CLAIMED * header.tokens)
        else:
            lengths = [tensor.size for tensor, _ in self._manifest.layout[p]]
            forged_N = FORGERIES[self._attack](delta_N, lengths, self._random)
        if self._attack == "stale":
            header = dataclasses.replace(header, base=max(0, header.base - 2))
        sent = pack(forged_N, codec, self._manifest.config.wire.zstd_level)
        return self._client.publish(dataclasses.replace(header, bytes=len(sent), digest=digest(sent)), sent)


@cache
def _of_wrong_labels(of: ModelConfig) -> Model:
    """Return a text model that is trained to predict the tokens of each sequence in reverse order."""
    model = build(of)

    def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        logits_BxTxV = model.logits(params, tokens_BxT1[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT1[:, :0:-1])
        return jnp.mean(losses)

    return model._replace(loss=loss, loss_and_penalty=None)


def wrong_labels(work: Workload) -> Workload:
    """Return one of our models, trained on wrong labels."""
    task = dataclasses.replace(work.named.task, loss=_of_wrong_labels(work.config.model).training_loss)
    return Workload.of(dataclasses.replace(work.named, task=task), work.config)
