"""Every key of a run is deleted, emptied and overwritten, and the run goes on to the same bits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

from archipelago.broker.published import full_snapshot, newest
from archipelago.broker.redis import chunks
from archipelago.broker.redis.client import fake_client
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.repair import kinds_of
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.wire import digest_of
from archipelago.ops.watch.run_view import observe
from tests.integration.damaged_run import DAMAGES, RUN, DamagedRun, Earlier

#: The rounds after which a checkpoint is taken, keys are damaged, and the run ends.
CHECKPOINT, DAMAGED, LAST = 2, 5, 9
#: Each key of a run, by its name in `Keys`. Keys of a family stand for all of it.
CASES: dict[str, Callable[[Keys], str]] = {
    **{name: attrgetter(name) for name in vars(Keys(RUN)) if name not in ("run", "tag")},
    "updates": lambda keys: keys.updates("a"),
    "actions": lambda keys: keys.actions("a"),
    "leases": lambda keys: keys.leases("a"),
    "taken": lambda keys: keys.taken("0"),
    "island": lambda keys: keys.island("a"),
    "name": lambda keys: keys.name("a"),
    "registry": lambda keys: REGISTRY,
    "head": lambda keys: keys.head(0),
    "fragment": lambda keys: keys.fragment(0),
    "outer": lambda keys: keys.outer(0),
    "difference": lambda keys: keys.difference(0, 3),
    "log": lambda keys: keys.log(0, 3),
    "handover": lambda keys: keys.handover("a/x"),
}
ALL = list(itertools.product(CASES, [*DAMAGES, "earlier"]))
#: The quick tier plays these cases, which cover each way of repair, and the full tier plays all.
QUICK = {
    ("state", "a list", "serving"), ("state", "not UTF-8", "restarted"), ("state", "earlier", "restarted"),
    ("epoch", "deleted", "serving"), ("epoch", "not UTF-8", "restarted"), ("epoch", "huge", "restarted"),
    ("lease", "a list", "restarted"), ("books", "not UTF-8", "serving"), ("books", "ahead", "restarted"),
    ("head", "deleted", "serving"), ("head", "ahead", "restarted"), ("head", "a list", "restarted"),
    ("log", "deleted", "serving"), ("log", "not UTF-8", "restarted"), ("difference", "deleted", "serving"),
    ("fragment", "deleted", "serving"), ("fragment", "not UTF-8", "restarted"), ("fragment", "earlier", "restarted"),
    ("outer", "deleted", "restarted"), ("outer", "earlier", "restarted"), ("tape", "a text", "serving"),
    ("tape", "huge", "serving"), ("tape", "ahead", "restarted"), ("snapshots", "a list", "serving"),
    ("evaluations", "not UTF-8", "serving"), ("island", "a text", "serving"), ("islands", "a list", "restarted"),
    ("manifest", "deleted", "serving"), ("manifest", "not UTF-8", "restarted"), ("data", "ahead", "restarted"),
    ("data", "a text", "serving"), ("updates", "deleted", "serving"), ("updates", "a list", "restarted"),
}  # fmt: skip
CASES_OF_ALL = [
    pytest.param(*case, id="-".join(case), marks=() if case in QUICK else pytest.mark.full)
    for case in ((*pair, when) for pair in ALL for when in ("serving", "restarted"))
]
#: Damages that delete merged contributions before a compaction covers them. A merger that starts then lacks the
#: momentum of these rounds, because the log of contributions is the state.
LOG_IS_LOST = {("updates", how, "restarted") for how in ("deleted", "emptied", "a list", "a text", "earlier")}
_SERVERS = itertools.count()
REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_each_key_has_a_case() -> None:
    names = {name for name in dir(Keys) if not name.startswith("_")} | set(vars(Keys(RUN)))
    assert {case[:2] for case in QUICK} <= set(ALL)
    assert names - set(CASES) == {
        "run",
        "tag",
        "patterns",
        "damaged",
        "short",
        "of_the_past",
        "chunk",
        "handover_chunks",
    }


def test_the_reference_has_a_row_for_each_key() -> None:
    section = REFERENCE.read_text(encoding="utf-8").partition("## Damaged keys")[2].partition("\n## ")[0]
    first = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    keys = Keys("RUN")
    plain = {str(getattr(keys, name)) for name in vars(keys) if name not in ("run", "tag")}
    families = {
        keys.updates("NAME"), keys.island("NAME"), keys.name("NAME"), keys.actions("NAME"), keys.leases("NAME"),
        keys.taken("SHARD"),
        keys.head("P"), keys.fragment("P"), keys.outer("P"),  # type: ignore[arg-type]
        keys.log("P", "V"),  # type: ignore[arg-type]
        keys.difference("P", "V"), f"{keys.tag}:handover:…", f"{keys.tag}:c:…", REGISTRY,  # type: ignore[arg-type]
    }  # fmt: skip
    assert {name for cell in first for name in re.findall(r"`([^`]+)`", cell)} == plain | families


def begun(client: object) -> DamagedRun:
    """Play five rounds. The checkpoint holds the first two."""
    run = DamagedRun(client)  # type: ignore[arg-type]
    run.play(DAMAGED, checkpoint=CHECKPOINT)
    return run


@cache
def undisturbed() -> dict[int, str]:
    run = begun(fake_client(f"damaged-{next(_SERVERS)}"))
    run.play(LAST)
    return run.digests


def damage(run: DamagedRun, name: str, how: str, earlier: Earlier | None) -> None:
    key = CASES[name](run.keys)
    if earlier is not None:
        earlier.put_back()
    else:
        DAMAGES[how](run, key)


def check(run: DamagedRun, *, same_bits: bool = True) -> None:
    """Assert that the run went on to the same bits, and that every key of it is sound again."""
    assert (run.digests == undisturbed()) == same_bits
    assert max(run.digests) == LAST
    manifest = run.manifest
    fresh = RedisTransport(run.client, RUN)
    for p in range(2):
        full = full_snapshot(fresh.reader, manifest, p)
        assert digest_of(full.params_N) == (full.snapshot.held or digest_of(full.params_N))
        last = newest(fresh.reader, manifest, p)
        assert digest_of(last.params_N) == last.snapshot.held == run.digests[last.snapshot.round]
    view = observe(fresh, manifest)
    assert view.balanced
    assert view.rounds == LAST
    kinds = kinds_of(run.keys, 2, ["a", "b"])
    found = {key: run.client.type(key).decode() for key in kinds}
    assert {key: kind for key, kind in found.items() if kind not in (kinds[key], "none")} == {}
    assert run.taken + run.merger.taken <= 5, "the merger loads the run again and again"


@pytest.mark.parametrize(("name", "how", "when"), CASES_OF_ALL)
def test_a_run_goes_on_to_the_same_bits(name: str, how: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "INLINE_BYTES", 64)  # so that all payloads lie in chunks
    run = DamagedRun(fake_client(f"damaged-{next(_SERVERS)}"))
    run.play(DAMAGED - 2, checkpoint=CHECKPOINT)
    earlier = Earlier(run, CASES[name](run.keys)) if how == "earlier" else None
    run.play(DAMAGED)
    if when == "serving":
        run.play(LAST, damage=lambda: damage(run, name, how, earlier))
    else:
        damage(run, name, how, earlier)
        run.restart()
        run.play(LAST)
    check(run, same_bits=(name, how, when) not in LOG_IS_LOST)
