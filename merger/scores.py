"""Scores: whether an island's contributions point where those of the other islands point, and are about as long.

When a round closes, a sample of the elements of every contribution is compared. An island's *agreement* is the upper
median of its cosines with the other islands. A minority cannot lend itself a good one, however well its members agree
with each other. The usual agreement of the round is the upper median over the islands. In a round of more than
JUDGES_MOST islands, that many of them judge all, so that a round takes time in proportion to its contributions. Each
round draws others, and a third of all islands is a majority of the judges in less than 3 rounds of 100.

An island's score is its agreement over the usual one, both averaged over recent rounds. The weight of its contributions
is multiplied by a factor of the score. The factor is exactly 1 for honest islands, also for slow ones and for those
with other data. It is 0 for an island whose contributions have nothing to do with those of the others, or point the
other way, and it returns to 1 when the island behaves. An island whose norms stay far above the usual one has them
clipped to the usual one.

With fewer than three islands there is no majority, and nothing changes. Contributions that are two or more
versions stale point nowhere in particular even if they are honest. They are not compared with others, and
lower no score. Only a stale contribution that points clearly away is left out of its round.

The sample and the judges are chosen by the digests of all contributions of the round. An island cannot know them
before it sends.
Nothing here depends on the rule by which contributions are merged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median_high
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.wire import Body

#: About how many elements of a contribution are compared, in windows of this many; a smaller fragment as a whole.
SAMPLE, WINDOW = 1 << 16, 1 << 10
#: Decay per round of all averages, which remember about ten rounds.
DECAY = 0.9
#: From this score on an island has its whole weight, and up to the lower one it has none.
SCORE_FULL, SCORE_NONE = 0.3, 0.1
#: Elements of an outer gradient are not independent: as many as these count as one when noise is estimated.
DEPENDENT = 10
#: A round counts if its usual agreement is this many standard deviations of noise.
ROUND_CLEAR = 2.0
#: An island is judged once the sum of usual agreements is this many standard deviations of noise.
SCORE_CLEAR = 8.0
#: A contribution whose agreement is below minus this share of the usual one is left out of its round at once.
AWAY = 0.3
#: Norms that stay above this multiple of the usual one are clipped to the usual one.
NORM_LARGE = 1.5
#: A norm counts as at most this multiple in the average.
NORM_MOST = 3.0
#: The operator is told of an island once its weight was lowered in this many rounds in a row.
NOTED = 2
#: Contributions up to this staleness judge, and are judged.
FRESH = 1
#: Fewer islands than this cannot outvote one.
JUDGES_LEAST = 3
#: Contributions are compared with those of at most this many islands.
JUDGES_MOST = 32


def short(value: float) -> float:
    """Return the value with 6 digits. Each commit stores such values, and the tape does."""
    return float(f"{value:.6g}")


class Score(NamedTuple):
    """What is remembered of one island.

    Attributes:
        agreement: Decayed sum of its agreement with the others.
        usual: Decayed sum of the agreement that an honest island with as many tokens is expected to have.
        noise: Decayed sum of the variance of the agreement of unrelated contributions.
        norm: Its norm, relative to the usual one of the round, averaged.
        rounds: How many rounds it was compared in.
        lowered: In how many of its last rounds in a row its weight was lowered.
    """

    agreement: float = 0.0
    usual: float = 0.0
    noise: float = 0.0
    norm: float = 1.0
    rounds: int = 0
    lowered: int = 0

    @property
    def value(self) -> float:
        """The score: 1 is usual, 0 unrelated, negative opposite. It is 1 while there is too little evidence."""
        if self.usual <= 0.0 or self.usual < SCORE_CLEAR * math.sqrt(self.noise):
            return 1.0
        return round(self.agreement / self.usual, 4)

    @property
    def factor(self) -> float:
        """The factor on the weight of the island's contributions, in [0, 1]."""
        return round(min(1.0, max(0.0, (self.value - SCORE_NONE) / (SCORE_FULL - SCORE_NONE))), 4)

    def after(self, agreement: float, usual: float, variance: float) -> Score:
        """Return the score with one more comparison of directions in it."""
        return self._replace(
            agreement=short(DECAY * self.agreement + agreement),
            usual=short(DECAY * self.usual + usual),
            noise=short(DECAY * DECAY * self.noise + variance),
        )

    def with_norm(self, norm: float) -> Score:
        """Return the score with one more norm in its average, which begins at 1 with the weight of a round."""
        new = max(1.0 - DECAY, 1.0 / (self.rounds + 2))
        average = self.norm + new * (min(norm, NORM_MOST) - self.norm)
        return self._replace(norm=short(average), rounds=self.rounds + 1)


@dataclass(frozen=True)
class Sent:
    """What a contribution is judged and weighed by.

    Attributes:
        staleness: Versions between its base and the fragment.
        steps: The inner steps of it that weigh (`claims.seen`).
        tokens: The tokens of it that weigh.
        norm: Its norm over the length of its path (`weights.path`).
        digest: The digest of its payload; of a sum, that of the last contribution.
        body: The contribution as its codec encoded it.
    """

    island: str
    staleness: int
    steps: int
    tokens: float
    norm: float
    digest: str
    body: Body


@dataclass(frozen=True)
class Judgement:
    """What follows for a round.

    Attributes:
        factors: The factor on the weight of each contribution.
        values: The score of each contribution's island.
        limits: The largest norm over path of each contribution; infinite where norms are usual.
        scores: The scores after the round.
    """

    factors: tuple[float, ...]
    values: tuple[float, ...]
    limits: tuple[float, ...]
    scores: Mapping[str, Score]


#: The start and the length of each tensor in a fragment's vector.
Spans = tuple[tuple[int, int], ...]


def judge(known: Mapping[str, Score], sent: Sequence[Sent], spans: Spans, live: int) -> Judgement:
    """Compare the contributions of a round with each other."""
    islands = _by_island(sent)
    if not sent or max(live, len(islands)) < JUDGES_LEAST:
        return unjudged(known, len(sent))
    fresh = {n: kept for n, own in islands.items() if (kept := [i for i in own if sent[i].staleness <= FRESH])}
    scores, away, (norms, usual) = dict(known), frozenset[int](), _norms(sent, islands)
    if len(fresh) >= JUDGES_LEAST:
        scores, away = _compared(scores, sent, fresh, spans)
        pointing_away = {sent[i].island for i in away}
        for name in islands:
            score = scores.get(name, Score()).with_norm(norms[name])
            is_lowered = score.factor < 1.0 or name in pointing_away
            scores[name] = score._replace(lowered=score.lowered + 1 if is_lowered else 0)
    of = [scores.get(one.island, Score()) for one in sent]
    factors = tuple(0.0 if i in away else score.factor for i, score in enumerate(of))
    limits = tuple(norm if score.norm > NORM_LARGE else math.inf for norm, score in zip(usual, of, strict=True))
    return Judgement(factors, tuple(score.value for score in of), limits, scores)


def unjudged(known: Mapping[str, Score], count: int) -> Judgement:
    """Return what follows for a round of `count` contributions in which contributions are not compared."""
    return Judgement((1.0,) * count, (1.0,) * count, (math.inf,) * count, known)


def _by_island(sent: Sequence[Sent]) -> dict[str, list[int]]:
    """Return the positions of each island's contributions, by name."""
    found: dict[str, list[int]] = {}
    for i, one in enumerate(sent):
        found.setdefault(one.island, []).append(i)
    return dict(sorted(found.items()))


def _compared(
    scores: Mapping[str, Score], sent: Sequence[Sent], fresh: Mapping[str, Sequence[int]], spans: Spans
) -> tuple[dict[str, Score], frozenset[int]]:
    """Return the scores after a comparison of directions, and the contributions that point clearly away.

    Args:
        fresh: The fresh contributions of each island that has any. Such islands are judged, and judge others.
    """
    seed = hashlib.sha256(" ".join(sorted(one.digest for one in sent)).encode()).digest()
    rows = [direction(one.body, spans, seed) for one in sent]
    tokens = {name: sum(sent[i].tokens for i in own) for name, own in fresh.items()}
    of = {name: _unit(sum(sent[i].tokens * rows[i] for i in own)) for name, own in fresh.items()}
    judges = drawn(list(fresh), seed)
    judging = np.stack([of[name] for name in judges])

    def agreement(row: NDArray[np.float64], island: str) -> float:
        # A product of matrices would let each library sum in another order, and is slow while others use the cores.
        cosines = np.einsum("jd,d->j", judging, row)
        others = [float(cosine) for name, cosine in zip(judges, cosines, strict=True) if name != island]
        return round(median_high(others), 4)  # rounding hides in which order a machine sums

    agreements = {name: agreement(of[name], name) for name in fresh}
    usual, noise = median_high(list(agreements.values())), math.sqrt(DEPENDENT / max(1, rows[0].size))
    out, usual_tokens = dict(scores), median_high(list(tokens.values()))
    if usual < ROUND_CLEAR * noise:
        return out, frozenset()
    for name in fresh:
        share = expected(tokens[name], usual_tokens)
        out[name] = out.get(name, Score()).after(agreements[name], usual * share, noise * noise)
    if usual < SCORE_CLEAR * noise:
        return out, frozenset()
    stale = {i: agreement(rows[i], one.island) for i, one in enumerate(sent) if one.staleness > FRESH}
    found = {i: agreements[name] for name, own in fresh.items() for i in own} | stale
    return out, frozenset(i for i, value in found.items() if value < -AWAY * usual)


def drawn(names: Sequence[str], seed: bytes) -> list[str]:
    """Return the islands that judge the others, by name: all of them, or JUDGES_MOST drawn by the seed."""
    return sorted(sorted(names, key=lambda name: hashlib.sha256(seed + name.encode()).digest())[:JUDGES_MOST])


def expected(tokens: float, usual_tokens: float) -> float:
    """Return the share of the usual agreement that an honest contribution of that many tokens has.

    A contribution of few steps is mostly noise: its cosine to others falls with the root of its tokens.
    """
    return math.sqrt(min(1.0, tokens / max(1.0, usual_tokens)))


def _norms(sent: Sequence[Sent], islands: Mapping[str, Sequence[int]]) -> tuple[dict[str, float], list[float]]:
    """Return each island's norm over path relative to the usual one, and the usual one for each contribution."""
    usual_tokens = median_high([max(sent[i].tokens for i in own) for own in islands.values()])
    of = {
        name: max(sent[i].norm * expected(sent[i].tokens, usual_tokens) for i in own) for name, own in islands.items()
    }
    usual = median_high(list(of.values()))
    if usual <= 0.0:
        return dict.fromkeys(of, 1.0), [math.inf] * len(sent)
    return {name: norm / usual for name, norm in of.items()}, [usual / expected(o.tokens, usual_tokens) for o in sent]


# -- the sample -------------------------------------------------------------------------------------------------------


def direction(body: Body, spans: Spans, seed: bytes) -> NDArray[np.float64]:
    """Return a sample of a contribution, in which every tensor has the norm that its size deserves, as a unit vector.

    Args:
        seed: Chooses the elements. Samples with equal seeds can be compared.
    """
    plan = _plan(spans)
    random = np.random.PCG64(int.from_bytes(seed, "big")).random_raw(sum(plan.windows))
    begins = iter([start + int(raw) % room for (start, room), raw in zip(plan.rooms, random, strict=True)])
    ranges: list[tuple[int, int]] = []
    for (start, length), count in zip(spans, plan.windows, strict=True):
        ranges += [(next(begins), WINDOW) for _ in range(count)] or [(start, length)]
    sampled = _decoded(body, ranges).astype(np.float64)
    at = 0
    for size, share in zip(plan.sizes, plan.shares, strict=True):
        sampled[at : at + size] = share * _unit(sampled[at : at + size])
        at += size
    return _unit(sampled)


def _unit(x_N: Any) -> NDArray[np.float64]:
    norm = float(np.sqrt(np.sum(np.square(x_N))))
    return np.asarray(x_N / norm if norm > 0.0 and math.isfinite(norm) else np.zeros_like(x_N))


@dataclass(frozen=True)
class _Plan:
    """How a fragment is sampled.

    Attributes:
        windows: For each tensor, how many windows are taken; 0 takes the whole tensor.
        rooms: For each window, the start of its tensor and in how many places of it the window can begin.
        sizes: For each tensor, how many elements are taken.
        shares: For each tensor, its norm in the sample.
    """

    windows: tuple[int, ...]
    rooms: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    shares: tuple[float, ...]


@cache
def _plan(spans: Spans) -> _Plan:
    elements = sum(length for _, length in spans)
    windows = tuple(
        0 if elements <= SAMPLE or length <= WINDOW else max(1, round(SAMPLE / WINDOW * length / elements))
        for _, length in spans
    )
    rooms = tuple(
        (start, length - WINDOW + 1)
        for (start, length), count in zip(spans, windows, strict=True)
        for _ in range(count)
    )
    sizes = tuple(count * WINDOW or length for (_, length), count in zip(spans, windows, strict=True))
    return _Plan(windows, rooms, sizes, tuple(math.sqrt(length / max(1, elements)) for _, length in spans))


def _decoded(body: Body, ranges: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    """Return the elements in some ranges, each a start and a length. Only the blocks that they lie in are decoded."""
    chosen = codec_of(body.codec)
    blocks: list[NDArray[np.intp]] = []
    wanted: list[NDArray[np.intp]] = []
    before = 0  # decoded elements of the ranges before
    for start, length in ranges:
        first, last = start // chosen.block, -(-(start + length) // chosen.block)
        blocks.append(np.arange(first, last))
        wanted.append(np.arange(length) + (before + start - first * chosen.block))
        before += (last - first) * chosen.block
    if not ranges:
        return np.zeros(0, np.float32)
    return chosen.decode_blocks(body.parts, np.concatenate(blocks))[np.concatenate(wanted)]
