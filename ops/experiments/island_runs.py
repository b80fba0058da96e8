"""Play runs of islands in virtual time to their end, and evaluate their merged parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from archipelago.islands.evaluation import published
from archipelago.islands.models.interface import Params
from archipelago.islands.tasks.ours import OurTask, our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments.baselines import Point, Progress, evaluations, scoring
from archipelago.ops.experiments.hostile import compiled_wrong
from archipelago.ops.experiments.trial import Trial
from archipelago.ops.experiments.virtual_time import VirtualRun, are_slow, paces


class LockstepRun(VirtualRun):
    """A run whose islands take each step together, and adopt at the same step boundary what they have sent there.

    No real run can do this. Compared with a `VirtualRun`, it shows what it costs that snapshots come later. All islands
    must be equally fast.
    """

    def play_one(self) -> None:
        """Let all islands pass their step boundary, merge what they have sent, and let them adopt it and train on."""
        self.clock.now = self._agenda[0][0]
        self._agenda.clear()  # all of it happens now
        for island in list(self.islands.values()):
            if island.finished or island.must_leave:
                self.remove_island(island.name, farewell=True)
        self._act_once()
        self.turn()
        self._act_once()
        for island in self.islands.values():
            self._train(island)


def islands(work: Workload, trial: Trial, progress: Progress | None = None) -> tuple[list[Point], VirtualRun]:
    """Play a run of islands to its end, without failing chips. Return the evaluations, and the finished run.

    Args:
        work: What they train.
        trial: How many there are, and which of them are slow, late, hostile, or read other text. Tokens count those of
            honest islands.
        progress: Receives each evaluation.
    """
    count = trial.islands
    if trial.lockstep:
        run: VirtualRun = LockstepRun(work, [1.0] * count)
        return play(run, scoring(work), progress), run
    seconds = paces(count, trial.slow, trial.slowed)
    on_the_way = [trial.sending * is_slow for is_slow in are_slow(count, trial.slowed)]
    attacks = {f"island-{number}": trial.attack for number in range(trial.hostile)}
    others = {f"island-{number}": part_of(work, number, count) for number in range(count if trial.apart else 0)}
    if trial.attack == "labels":
        wrong = compiled_wrong(work.config.model, work.config.inner)
        others |= {name: dataclasses.replace(others.get(name, work), steps=wrong) for name in attacks}
    run = VirtualRun(work, seconds, sending_seconds=on_the_way, attacks=attacks, others=others)
    return play(run, scoring(work), progress), run


def play(run: VirtualRun, point: Callable[[int, Params], Point], progress: Progress | None = None) -> list[Point]:
    """Play a run to its end. Return evaluations of its merged parameters over the tokens of all honest islands.

    Args:
        run: The run.
        point: Evaluates parameters (`baselines.scoring`).
        progress: Receives each evaluation.
    """
    config = run.manifest.config
    trained: dict[str, int] = {}
    points: list[Point] = []

    def note() -> None:
        trained.update({name: island.totals.tokens for name, island in run.islands.items() if name not in run.attacks})
        points.append(point(sum(trained.values()), published(run.transport, run.manifest)[0]))
        if progress:
            progress(points[-1])

    note()
    marks = evaluations(config)
    for mark in range(1, marks):
        due = config.inner.steps * mark // marks
        run.advance_until(lambda due=due: run.merger.state.step >= due)  # type: ignore[misc]
        note()
    last = dict(run.islands)
    run.finish()
    trained.update({name: island.totals.tokens for name, island in last.items() if name not in run.attacks})
    note()
    return points


def part_of(work: Workload, number: int, of: int) -> Workload:
    """Return one of our models on a part of its text, cut into `of` parts."""
    assert isinstance(work.named, OurTask)  # noqa: S101 - studies train our models
    corpus = work.named.corpus
    length = len(corpus.train) // of
    part = dataclasses.replace(corpus, train=corpus.train[number * length : (number + 1) * length])
    return our_work(work.config, part)


def participation(run: VirtualRun) -> tuple[int, float]:
    """Return the number of rounds, and the mean number of contributions in a round."""
    members = [len(entry.members) for entry in run.transport.reader.tape(1 << 30)]
    return len(members), sum(members) / max(1, len(members))


def staleness(run: VirtualRun) -> tuple[float, int]:
    """Return the mean and the maximum staleness of merged contributions, in versions of their fragment."""
    found = [member.staleness for entry in run.transport.reader.tape(1 << 30) for member in entry.members]
    return sum(found) / max(1, len(found)), max(found, default=0)
