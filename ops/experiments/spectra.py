"""`archipelago bench spectra`: what islands and data-parallel training move a matrix by, direction by direction.

Both continue from the same parameters and optimiser state for one interval on as many tokens: M islands with one batch
each, and data-parallel with all M batches. A good outer gradient points where training goes, in this interval and in
the long run. A second data-parallel run on other text shows how near any direction can come.

The singular directions u_i v_iᵀ of the islands' mean outer gradient are orthonormal. Along them, the mean moves by s_i,
the isotropic merge by equal amounts, and data-parallel by a_i = u_iᵀ P v_i.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from numpy.typing import NDArray

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import keep_compiled
from archipelago.islands.creation import fitted
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.sharding import lease_share
from archipelago.islands.inner import InnerState, begin
from archipelago.islands.models.registry import build
from archipelago.islands.tasks.ours import our_work
from archipelago.merger.spectrum import with_power
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.baselines import CHUNK_STEPS
from archipelago.ops.experiments.settings import require_counts
from archipelago.ops.plots import add_grid_and_legend, can_draw, pyplot

Matrix = NDArray[np.float64]
#: The singular directions of a matrix are averaged in this many groups, from the strongest to the weakest.
GROUPS = 16
#: The long run, in intervals.
LONG_INTERVALS = 8


@dataclass(frozen=True)
class SpectraOptions(OutputOptions):
    """Compare the movement of islands and of data-parallel training over one interval by its singular directions."""

    islands: int = 8
    """The number of islands."""
    after: int = 600
    """Begin after this many steps of data-parallel training."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: SpectraOptions) -> int:
    """Compare, and write the results."""
    config = checked(options.settings)
    require_counts("--islands", (options.islands,))
    if options.after < 0:
        raise ConfigError(f"--after is {options.after}", "Give a number of steps, or 0.", code="config.after")
    keep_compiled()
    corpus = open_corpus(config.data.corpus)
    with progress("training data-parallel and the islands"):
        found = spectra(fitted(config, corpus), corpus, options.islands, options.after)
    if can_draw():
        options.output.mkdir(parents=True, exist_ok=True)
        draw(options.output / "spectra.png", found["profiles"], options.islands)
        found |= {"picture": str(options.output / "spectra.png")}
    return finish("spectra", found, options)


@dataclass(frozen=True)
class Comparison:
    """The directions of one matrix.

    Attributes:
        lengths: L2 norms of the movements over one interval by name, as shares of data-parallel's.
        cosines: Cosines by name to the movement of data-parallel over one interval.
        later: Cosines by name to its movement over LONG_INTERVALS intervals.
        profiles: Movements along singular directions, in GROUPS groups, from the strongest to the weakest. A matrix
            with equal singular values has ones.
    """

    lengths: dict[str, float]
    cosines: dict[str, float]
    later: dict[str, float]
    profiles: dict[str, Matrix]


def spectra(config: RunConfig, corpus: OpenCorpus, islands: int, after: int) -> dict[str, Any]:
    """Return plain data: a row for each movement, and profiles, both as means over all hidden matrices."""
    model, steps = build(config.model), our_work(config, corpus).steps
    names = hidden_matrices(model.tensors, config.model.size)

    def trained(state: InnerState, done: int, count: int, batch: int, seed: int, number: int, of: int) -> InnerState:
        data = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=batch))
        batches = Batches(corpus.train, data, lease_share(config.data.shards, seed, number, of))
        state = jax.tree.map(jnp.array, state)  # the steps donate their input
        for first in range(done, done + count, CHUNK_STEPS):
            n = min(CHUNK_STEPS, done + count - first)
            state, _ = steps(state, jnp.asarray(batches.next(n)), jnp.asarray(first, jnp.int32))
        return state

    size, interval, seed = config.data.batch_size, config.sync.interval, config.seed
    start = trained(begin(config.inner, model.init(seed)), 0, after, size * islands, seed, 0, 1)
    own = [trained(start, after, interval, size, seed + 1, m, islands).params for m in range(islands)]
    one, again = (trained(start, after, interval, size * islands, seed + k, 0, 1).params for k in (2, 3))
    later = trained(start, after, LONG_INTERVALS * interval, size * islands, seed + 4, 0, 1).params
    found = []
    for name in names:
        ends = [np.asarray(params[name], np.float64) for params in (*own, one, again, later)]
        *deltas, one_P, again_P, later_P = (np.asarray(start.params[name], np.float64) - end for end in ends)
        found.append(compared(deltas, one_P, again_P, later_P))
    rows = [
        {
            "movement": name,
            "length": _mean(each.lengths[name] for each in found),
            "cosine_to_this_interval": _mean(each.cosines[name] for each in found),
            f"cosine_to_{LONG_INTERVALS}_intervals": _mean(each.later[name] for each in found),
        }
        for name in found[0].cosines
    ]
    profiles = {name: np.mean([each.profiles[name] for each in found], axis=0).tolist() for name in found[0].profiles}
    return {"config": config.digest(), "islands": islands, "after": after, "rows": rows, "profiles": profiles}


def hidden_matrices(tensors: Sequence[Tensor], model: str) -> list[str]:
    """Return the names of the hidden matrices. Raise ConfigError if the model has none."""
    names = [t.name for t in tensors if t.kind == "rest" and len(t.shape) == 2 and min(t.shape) > 1]
    if not names:
        raise ConfigError(
            f"the model {model} has no hidden matrices, whose spectra could be compared",
            "Choose another one with --model.size.",
            code="config.no-matrices",
        )
    return names


def compared(own: Sequence[Matrix], together: Matrix, again: Matrix, later: Matrix) -> Comparison:
    """Compare the islands' outer gradients of one matrix with data-parallel.

    Args:
        own: One outer gradient for each island.
        together: The movement of data-parallel over one interval.
        again: The same on other text.
        later: Its movement over several intervals.
    """
    mean = sum(own, np.zeros_like(together)) / len(own)
    units = sum((delta / np.linalg.norm(delta) for delta in own), np.zeros_like(together))
    rda = units / np.linalg.norm(units) * np.mean([np.linalg.norm(delta) for delta in own])
    named = {
        "one island": own[0],
        "the islands, averaged": mean,
        "the islands, RDA": rda,
        "isotropic, exponent 0.5": _of_length(with_power(rda.astype(np.float32), 0.5), rda),
        "isotropic, exponent 0": _of_length(with_power(rda.astype(np.float32), 0.0), rda),
        "data-parallel on other text": again,
    }
    left, values, right = np.linalg.svd(rda, full_matrices=False)
    moved = {
        "islands": values,
        "data-parallel": np.linalg.svd(together, compute_uv=False),
        "data-parallel along them, this interval": np.einsum("ri,rc,ic->i", left, together, right),
        "data-parallel along them, later": np.einsum("ri,rc,ic->i", left, later, right),
    }
    return Comparison(
        {name: float(np.linalg.norm(value) / np.linalg.norm(together)) for name, value in named.items()},
        {name: cosine(value, together) for name, value in named.items()},
        {name: cosine(value, later) for name, value in named.items()},
        {name: grouped(each / np.linalg.norm(each)) for name, each in moved.items()},
    )


def _of_length(value: Matrix, like: Matrix) -> Matrix:
    return value * (np.linalg.norm(like) / np.linalg.norm(value))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def cosine(one: Matrix, other: Matrix) -> float:
    """Return the cosine of two matrices as vectors."""
    return float(np.vdot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


def grouped(values: Matrix) -> Matrix:
    """Return the means of successive groups, times the root of the number of values: ones where all are equal."""
    edges = np.linspace(0, len(values), GROUPS + 1).astype(int)
    means = [float(values[a : max(b, a + 1)].mean()) for a, b in pairwise(edges)]  # Few values are in several groups.
    return np.array(means) * math.sqrt(len(values))


def draw(path: Path, profiles: dict[str, Sequence[float]], islands: int) -> None:
    """Draw the spectra, and where data-parallel moves along the islands' singular directions."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), dpi=120, layout="constrained")
    lines = (
        (f"Singular values over one interval, {islands} islands", ("islands", "data-parallel")),
        (
            "Movement along the islands' singular directions",
            ("islands", "data-parallel along them, this interval", "data-parallel along them, later"),
        ),
    )
    for axes, (title, names) in zip(panels, lines, strict=True):
        for name in names:
            axes.plot((np.arange(GROUPS) + 0.5) / GROUPS, profiles[name], marker="o", markersize=3, label=name)
        axes.axhline(1.0, color="black", linewidth=1, label="isotropic merge")
        axes.set(title=title, xlabel="singular directions, from the strongest to the weakest")
        axes.set(ylabel="share of the movement (1: the same in all)", ylim=(0, None))
        add_grid_and_legend(axes)
    figure.savefig(path)
    plt.close(figure)
