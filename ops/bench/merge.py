"""`archipelago bench merge`: what merging costs.

Codecs against copying, and merging against bare numpy. Both sides of a ratio take turns in one process, where XLA and
numpy have one thread each. Then runs with few and with many islands, through a real merger and Redis. `archipelago
bench accelerator` measures the spectra of isotropic merging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from archipelago.broker.codecs import CODECS, Vector
from archipelago.broker.config import InnerConfig, MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.machine import keep_freed_memory
from archipelago.broker.manifest import Tensor
from archipelago.broker.messages import Snapshot
from archipelago.broker.wire import pack, unpack, unpack_encoded
from archipelago.ops.bench.accelerator_codecs import frameworks
from archipelago.ops.bench.harness import child, cpu_seconds, manifest_of, own_run, serve_merger
from archipelago.ops.bench.output import OutputOptions, compared, finish, ratio_row, seconds_of, taking_turns
from archipelago.ops.bench.played import PATIENCE_SECONDS, PlayedIslands, contribution_of
from archipelago.ops.launch.supervisor import ONE_THREAD

RUN = "bench-merge"
GOAL_INT4 = 0.25


@dataclass(frozen=True)
class MergeOptions(OutputOptions):
    """Measure codecs against copying, merging against bare numpy on one thread, and runs with up to 256 islands."""

    quick: bool = False
    """Use smaller vectors, fewer rounds and at most 16 islands."""


def main(options: MergeOptions) -> int:
    return finish("merge", merge(options.quick), options)


def merge(quick: bool) -> dict[str, Any]:
    """Measure arithmetic in a process that has one thread, then many islands. Return plain data with `rows`."""
    with child(_arithmetic, quick, environment=ONE_THREAD) as measuring:
        rows = measuring.receive()
    few, many = QUICK_MANY if quick else MANY
    contributions = MANY_CONTRIBUTIONS // (16 if quick else 1)
    return {"rows": rows + many_islands(few, many, MANY_ELEMENTS, contributions)}


def _arithmetic(pipe: Connection, quick: bool) -> None:
    keep_freed_memory()  # The merger does this too, and numpy gains as much from it.
    rounds = 5 if quick else 15
    pipe.send(codecs(10**7 if quick else 10**8, 3) + merging(10**6, rounds) + merging(10**7, rounds))


def timed_row(
    what: str, ours: Callable[[], object], against: str, floor: Callable[[], object], rounds: int, goal: float | str
) -> dict[str, Any]:
    """Let both take turns, and return the line of the table with their milliseconds."""
    found = compared(*taking_turns([lambda: seconds_of(floor), lambda: seconds_of(ours)], rounds))
    return ratio_row(f"{what}, ms", 1e3 * found.second, against, 1e3 * found.first, found.ratio, goal)


# -- codecs -----------------------------------------------------------------------------------------------------------


def codecs(elements: int, rounds: int) -> list[dict[str, Any]]:
    """Compare encoding and decoding, in numpy and compiled by JAX, with one copy of the float32 vector."""
    values_N = np.random.default_rng(0).standard_normal(elements, np.float32)
    target_N = np.empty_like(values_N)
    jax, rows = next(frameworks()), list[dict[str, Any]]()
    device_N = jax.put(values_N)

    def by_numpy(name: str) -> object:
        return CODECS[name].decode(CODECS[name].encode(values_N), elements)

    def by_jax(name: str) -> object:  # as two programs, so that the encoded arrays exist in between
        return jax.wait(jax.restore(name, jax.quantise(name, device_N), elements))

    for name in CODECS:
        for how, there_and_back in (("numpy", partial(by_numpy, name)), ("JAX", partial(by_jax, name))):
            goal = GOAL_INT4 if (name, how) == ("int4", "JAX") else ""
            what, copy = f"{name}, {how}, {elements / 1e6:g} M", partial(np.copyto, target_N, values_N)
            rows.append(timed_row(what, there_and_back, "one copy", copy, rounds, goal))
    return rows


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
        ours, decoding, stepping = _merger_and_bare(rule, elements, contributions)
        goal = 1.0 if rule == "average" else ""
        rows.append(timed_row(f"{what}, {rule}", ours, "numpy that also decodes", decoding, rounds, goal))
        rows.append(timed_row(f"{what}, {rule}", ours, "numpy, decoded before", stepping, rounds, goal))
    return rows


def _merger_and_bare(rule: Literal["average", "rda"], elements: int, contributions: int) -> list[Callable[[], object]]:
    """Return a merged round, and the same by numpy with the decoding and without it."""
    from archipelago.merger import merge_rules
    from archipelago.merger.round_merge import Addend, RoundMerge, new_state
    from archipelago.merger.rounds import Close
    from archipelago.merger.state import RunState

    merge = MergeConfig(embedding=rule, rest=rule)
    config = RunConfig(merge=merge, wire=WireConfig(up="int4", down="float32"))
    manifest = manifest_of(RUN, config, [Tensor("all", (elements,))], [["all"]])
    rules, random = RoundMerge.of(manifest), np.random.default_rng(0)
    params_N = random.standard_normal(elements, np.float32)
    state, fragment = RunState(), new_state(params_N, rules.outer)
    payloads = [pack(random.standard_normal(elements, np.float32), "int4", 0) for _ in range(contributions)]
    arrived = [(f"i{n}", contribution_of(f"i{n}"), unpack_encoded(each, elements)) for n, each in enumerate(payloads)]

    def ours() -> object:
        addends = [Addend(*each, *merge_rules.norms(each[-1], rules.groups[0])) for each in arrived]
        return rules.close(fragment, state, addends, contributions, Close(1, 0, 1, 0.0, 0.0, 0.0))

    def decoded() -> list[Vector]:
        return [unpack(payload, elements) for payload in payloads]

    bare = _BareNesterov(params_N, config.outer.learning_rate, config.outer.momentum)
    return [ours, lambda: bare.step(decoded()), partial(bare.step, decoded())]


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


# -- many islands ------------------------------------------------------------------------------------------------------

#: The numbers of islands to compare, and the elements of a contribution.
MANY, QUICK_MANY, MANY_ELEMENTS = (16, 256), (4, 16), 1 << 14
#: Contributions that are measured, and rounds before them: the merger compiles, and meets the islands.
MANY_CONTRIBUTIONS, MANY_WARM_UPS = 3072, 3
#: A contribution may cost this share more with many islands.
GOAL_MANY = 1.1
#: How much of a contribution is the same in all of them, so that islands agree as honest ones do.
SHARED = 0.7


def many_islands(few: int, many: int, elements: int, contributions: int) -> list[dict[str, Any]]:
    """Compare the merger's processor time for a contribution between runs of two numbers of islands.

    Merger and Redis are the real ones. This process plays the islands: each claims its name, sends heartbeats, and
    contributes to every round with a payload that was encoded before.
    """
    theirs, mine = (_merger_seconds(islands, elements, max(1, contributions // islands)) for islands in (few, many))
    what = f"a contribution of {elements:,} with {many} islands, merger's processor time, ms"
    return [ratio_row(what, 1e3 * mine, f"with {few} islands", 1e3 * theirs, goal=GOAL_MANY)]


def _merger_seconds(islands: int, elements: int, rounds: int) -> float:
    """Return the processor time that a contribution to these rounds takes the merger."""
    config = RunConfig(
        inner=InnerConfig(steps=1 << 30),
        sync=SyncConfig(interval=1, fragments=1, window=1, quorum=islands),
        wire=WireConfig(up="int4", thin="", down="int4"),
    )
    manifest = manifest_of(RUN, config, [Tensor("all", (elements,))], [["all"]])
    zeros = pack(np.zeros(elements, np.float32), "float32", 0)
    with own_run(manifest, [zeros]) as (server, transport), child(serve_merger, server.url, RUN, (), 2) as merger:
        merger.receive(PATIENCE_SECONDS)
        payloads = {f"island-{number:03}": _payload(elements, number) for number in range(islands)}
        played = PlayedIslands(transport, payloads)

        def play(first: int, last: int) -> None:
            """Let all islands contribute to these rounds, and wait until each has closed."""
            for goal in range(first, last + 1):
                played.publish(payloads, sequence=goal, round=goal, base=goal - 1, global_step=goal)
                while played.hear(Snapshot).round < goal:
                    continue

        play(1, MANY_WARM_UPS)
        before = cpu_seconds(merger.pid)
        play(MANY_WARM_UPS + 1, MANY_WARM_UPS + rounds)
        return (cpu_seconds(merger.pid) - before) / (rounds * islands)


def _payload(elements: int, number: int) -> bytes:
    shared_N, own_N = (np.random.default_rng(seed).standard_normal(elements, np.float32) for seed in (0, number + 1))
    return pack(SHARED * shared_N + (1.0 - SHARED) * own_N, "int4", 0)
