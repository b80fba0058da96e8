"""The events of a run, in order, and what an operator does about them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from archipelago.broker.messages import UNSAVED, Note, Refusal

#: Pairs of words in the reason of a refusal, and what to do. The first that matches counts.
_REFUSALS = (
    ("over the cap", "Its link or its steps are too slow for the run: give it a faster link, or choose a larger "
                     "sync.interval in a new run. A single late contribution is harmless."),
    ("far ahead", "The run went back to a checkpoint. The island follows by itself within seconds."),
    ("not exist yet", "The run went back to a checkpoint. The island follows by itself within seconds."),
    ("too many", "The merger is slower than the islands. It catches up, or needs a faster machine."),
    ("repeat", "Nothing has to be done."),
    ("expelled", "The operator or the run's rule has expelled it. To admit it: `archipelago steer URL island.NAME=`."),
    ("finite", "Its arithmetic broke. Start it again; if that repeats, lower the learning rate in a new run."),
    ("digest", "Its bytes were changed on the way. Check its network, its machine and its version of the program."),
    ("sign", "It has no invitation to this run, or a wrong one. Create a join file with `archipelago invite`."),
    ("in the name of", "Somebody sends in another's name. Give each island credentials of its own (`invite`)."),
    ("impossible", "Its clock or its counters are wrong, or it cheats. Start it again, or expel it."),
    ("codec", "It has another version of the program. Install the run's version there."),
)  # fmt: skip

#: By kind of event. About others, nothing has to be done.
_REMEDIES = {
    "replaced": "Give each island its own --name. The newer process goes on.",
    "diverged": "Start it again: it takes the run's parameters. If all islands diverge, begin a new run with a lower "
                "--inner.learning-rate.",
    "drained": "To let it join again: `archipelago steer URL island.NAME=`, and start it.",
    "expelled": "To let it join again: `archipelago steer URL island.NAME=`, and start it.",
    "lowered": "Check the island's corpus, its software and its device. Its weight returns when it agrees again.",
    "idle": "Look at these islands' logs: they live and send nothing. Restart or expel them.",
    "paused": "Resume merging with `archipelago steer URL merging=`.",
    UNSAVED: "Do what it says; the merger tries again by itself.",
    "repaired": "Find out who else writes to this Redis, and give each program credentials of its own.",
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A note, or refusals that repeat each other, as one line of a run's history.

    Attributes:
        remedy: What to do about it; empty if nothing has to be done.
        times: How many refusals of that island for that reason came in a row. The other fields are those of the newest.
    """

    unix_seconds: float
    who: str
    kind: str
    text: str
    remedy: str = ""
    times: int = 1


def events_of(notes: Sequence[Note], refusals: Sequence[tuple[float, Refusal]]) -> list[Event]:
    """Return notes and refusals as one list, oldest first."""
    found = [Event(note.unix_seconds, note.who, note.kind, note.text, _REMEDIES.get(note.kind, "")) for note in notes]
    for at, each in refusals:
        text = f"round {each.round:,}: {each.reason}"
        found.append(Event(at, each.island, "refused", text, refusal_remedy(each.reason)))
    out: list[Event] = []
    for event in sorted(found, key=lambda event: event.unix_seconds):
        if out and event.kind == "refused" and _without_round(event) == _without_round(out[-1]):
            event = replace(event, times=out.pop().times + 1)
        out.append(event)
    return out


def _without_round(event: Event) -> tuple[str, str, str]:
    return event.who, event.kind, event.text.partition(": ")[2]


def refusal_remedy(reason: str) -> str:
    """Return what to do about a refusal, by its reason."""
    low = reason.lower()
    return next((remedy for words, remedy in _REFUSALS if words in low), "Look at the island's log and its version.")
