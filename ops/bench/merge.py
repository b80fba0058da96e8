"""`archipelago bench merge`: the cost of the merger's arithmetic.

Codecs against copying, merging against bare numpy, and the spectra of isotropic merging against merging.
Both sides of a ratio take turns in one process, where XLA and numpy have one thread each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from archipelago.broker.codecs import CODECS, Vector
from archipelago.broker.config import MergeConfig, RunConfig, WireConfig
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.broker.messages import Contribution
from archipelago.broker.process import keep_freed_memory
from archipelago.broker.wire import pack, unpack, unpack_encoded
from archipelago.merger.spectrum import with_power
from archipelago.ops.bench.output import OutputOptions, finish, with_picture
from archipelago.ops.launch.supervisor import ONE_THREAD

GOAL_INT4 = 0.25


@dataclass(frozen=True)
class MergeOptions(OutputOptions):
    """Measure codecs against copying, and the merger's arithmetic against bare numpy, each on one thread."""

    quick: bool = False
    """Use smaller vectors and fewer rounds."""


def main(options: MergeOptions) -> int:
    """Measure, and write the results."""
    return finish("merge", with_picture("merge", merge(options.quick), options), options)


def merge(quick: bool) -> dict[str, Any]:
    """Measure in a process that has one thread. Return plain data with `rows`."""
    command = [sys.executable, "-P", "-m", "archipelago.ops.bench.merge", *(["--quick"] if quick else [])]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ArchipelagoError("the measuring process failed", "See its output above.", code="bench.process-failed")
    return {"rows": json.loads(done.stdout)}


def ratio_of(floor: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Let both take turns. Return their median seconds and the median of the ratio; the first round does not count."""
    pairs = [(_seconds(floor), _seconds(ours)) for _ in range(rounds + 1)][1:]
    seconds = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return seconds[0], seconds[1], statistics.median(theirs / mine for theirs, mine in pairs)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _row(what: str, against: str, found: tuple[float, float, float], goal: float | str = "") -> dict[str, Any]:
    theirs, mine, ratio = found
    return {
        "what": what, "against": against, "milliseconds": 1e3 * mine, "theirs_milliseconds": 1e3 * theirs,
        "ratio": ratio, "goal": goal,
    }  # fmt: skip


# -- codecs -----------------------------------------------------------------------------------------------------------


def codecs(elements: int, rounds: int) -> list[dict[str, Any]]:
    """Compare encoding and decoding, in numpy and compiled by JAX, with one copy of the float32 vector."""
    values_N = np.random.default_rng(0).standard_normal(elements, np.float32)
    target_N = np.empty_like(values_N)
    rows = []
    for name in CODECS:
        sides = (("numpy", _in_numpy(name, values_N)), ("JAX", _in_jax(name, values_N)))
        for how, there_and_back in sides:
            found = ratio_of(lambda: np.copyto(target_N, values_N), there_and_back, rounds)
            goal = GOAL_INT4 if (name, how) == ("int4", "JAX") else ""
            rows.append(_row(f"{name}, {how}, {elements / 1e6:g} M", "one copy", found, goal))
    return rows


def _in_numpy(name: str, values_N: Vector) -> Callable[[], object]:
    return lambda: CODECS[name].decode(CODECS[name].encode(values_N), values_N.size)


def _in_jax(name: str, values_N: Vector) -> Callable[[], object]:
    """Return both directions as two programs, so that the encoded arrays exist in between."""
    import jax
    import jax.numpy as jnp

    chosen, device_N = CODECS[name], jnp.asarray(values_N)
    quantise = jax.jit(lambda x_N: chosen.quantise(x_N, jnp))
    restore = jax.jit(lambda parts: chosen.restore(parts, values_N.size, jnp))
    return lambda: restore(quantise(device_N)).block_until_ready()


# -- merging ----------------------------------------------------------------------------------------------------------


def merging(elements: int, rounds: int, contributions: int = 4) -> list[dict[str, Any]]:
    """Compare a merged round with bare numpy.

    The merger decodes int4 contributions, checks them for NaN, takes their norms for clipping, adds them, compares
    their directions, and closes the round with a Nesterov step. Numpy only adds and steps, with the decoding or without
    it.
    """
    what = f"{contributions} int4 of {elements / 1e6:g} M and a Nesterov step"
    rows = []
    for rule in ("average", "rda"):
        ours, bare, payloads = _merger_and_bare(rule, elements, contributions)
        deltas = [unpack(payload, elements) for payload in payloads]

        def decoding(bare: _BareNesterov = bare, payloads: list[bytes] = payloads) -> Vector:
            return bare.step([unpack(payload, elements) for payload in payloads])

        found = ratio_of(decoding, ours, rounds)
        rows.append(_row(f"{what}, {rule}", "numpy that also decodes", found, 1.0 if rule == "average" else ""))
        found = ratio_of(lambda bare=bare, deltas=deltas: bare.step(deltas), ours, rounds)  # type: ignore[misc]
        rows.append(_row(f"{what}, {rule}", "numpy, decoded before", found, 1.0 if rule == "average" else ""))
        trusting, _, _ = _merger_and_bare(rule, elements, contributions, scores=False)
        found = ratio_of(trusting, ours, rounds)
        rows.append(_row(f"{what}, {rule}", "the same without scores of islands", found))
    return rows


# -- spectra ----------------------------------------------------------------------------------------------------------

#: Rows, columns and exponent of hidden matrices and embeddings of models from 1 M to 1 B parameters.
MATRICES = (
    (128, 128, 0.0), (128, 512, 0.0), (512, 1408, 0.0), (768, 3072, 0.0), (2048, 5504, 0.0),
    (256, 128, 0.5), (8192, 512, 0.5), (50257, 768, 0.5),
)  # fmt: skip
QUICK_ELEMENTS = 1_000_000


def spectra(largest: int) -> list[dict[str, Any]]:
    """Compare the spectrum of one matrix, taken once a round, with merging four contributions of it by RDA."""
    rows = []
    for height, width, exponent in MATRICES:
        if height * width > largest:
            continue
        matrix_RC = np.random.default_rng(0).standard_normal((height, width), np.float32)
        by_rda, _, _ = _merger_and_bare("rda", matrix_RC.size, 4)
        found = ratio_of(by_rda, partial(with_power, matrix_RC, exponent), 1)
        rows.append(
            _row(f"spectrum of {height:,} × {width:,}, exponent {exponent:g}", "merging 4 int4 of it, RDA", found)
        )
    return rows


def _merger_and_bare(
    rule: Literal["average", "rda"], elements: int, contributions: int, *, scores: bool = True
) -> tuple[Callable[[], object], _BareNesterov, list[bytes]]:
    from archipelago.merger.round_merge import RoundMerge, new_state
    from archipelago.merger.state import RunState

    merge = MergeConfig(embedding=rule, rest=rule, scores=scores)
    config = RunConfig(merge=merge, wire=WireConfig(up="int4", down="float32"))
    manifest = Manifest("bench", config, (Tensor("all", (elements,)),), (("all",),), Corpus("none", "0" * 32, 1), {})
    rules, random = RoundMerge.of(manifest), np.random.default_rng(0)
    params_N = random.standard_normal(elements, np.float32)
    state, fragment = RunState(), new_state(params_N, rules.outer)
    payloads = [pack(random.standard_normal(elements, np.float32), "int4", 0) for _ in range(contributions)]
    arrived = [(str(n), _contribution(n), unpack_encoded(payload, elements)) for n, payload in enumerate(payloads)]

    def ours() -> object:
        round_sum = rules.begin(0, fragment, 0)
        for each in arrived:
            round_sum.add(*each)
        return rules.close(fragment, state, round_sum, contributions)

    return ours, _BareNesterov(params_N, config.outer.learning_rate, config.outer.momentum), payloads


class _BareNesterov:
    """Only the arithmetic of a round, into arrays that exist already."""

    def __init__(self, params_N: Vector, rate: float, momentum: float) -> None:
        self._params_N, self._rate, self._mu = params_N, np.float32(rate), np.float32(momentum)
        self._trace_N, self._sum_N, self._scratch_N = (np.zeros_like(params_N) for _ in range(3))
        self._new_N = np.empty_like(params_N)

    def step(self, deltas: Sequence[Vector]) -> Vector:
        """Return θ − η(Δ + μb) after b ← μb + Δ, where Δ is the mean of the deltas."""
        share = np.float32(1 / len(deltas))
        np.multiply(deltas[0], share, out=self._sum_N)
        for delta_N in deltas[1:]:
            np.multiply(delta_N, share, out=self._scratch_N)
            np.add(self._sum_N, self._scratch_N, out=self._sum_N)
        np.multiply(self._trace_N, self._mu, out=self._trace_N)
        np.add(self._trace_N, self._sum_N, out=self._trace_N)
        np.multiply(self._trace_N, self._mu, out=self._scratch_N)
        np.add(self._scratch_N, self._sum_N, out=self._scratch_N)
        np.multiply(self._scratch_N, self._rate, out=self._scratch_N)
        return np.subtract(self._params_N, self._scratch_N, out=self._new_N)


def _contribution(number: int) -> Contribution:
    return Contribution(
        island=f"i{number}", incarnation="x", sequence=0, round=1, fragment=0, base=0, tokens=1, steps=1,
        global_step=0, loss=1.0, step_seconds=1.0, farewell=False, codec="int4", bytes=0, digest="0" * 32,
    )  # fmt: skip


if __name__ == "__main__":
    quick = "--quick" in sys.argv[1:]
    keep_freed_memory()  # The merger does this too, and numpy gains as much from it.
    rounds = 5 if quick else 15
    found = codecs(10_000_000 if quick else 100_000_000, 3) + merging(1_000_000, rounds) + merging(10_000_000, rounds)
    found += spectra(QUICK_ELEMENTS if quick else 1 << 30)
    sys.stdout.write(json.dumps(found))
