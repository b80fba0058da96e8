"""Messages: lossless text, and errors that name the invalid field."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from annotated_types import Ge, Le, MaxLen
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import WireError
from archipelago.broker.messages import (
    EVENTS,
    KINDS,
    MEASURE_MAX,
    Call,
    Contribution,
    Counters,
    Digest,
    Evaluation,
    Handover,
    Marker,
    Measure,
    Name,
    Note,
    Refusal,
    Resume,
    RoundMember,
    Seconds,
    Snapshot,
    TapeEntry,
    from_fields,
    to_fields,
)
from archipelago.broker.presence import Heartbeat
from tests import samples

MESSAGES = [
    Contribution, Call, Snapshot, Refusal, Resume, Marker, Heartbeat, TapeEntry, Evaluation, Counters, Handover, Note,
]  # fmt: skip
TAPE = samples.commit([]).tape
EXAMPLES: dict[type[Any], Any] = {
    Contribution: samples.contribution(),
    Call: Call(1, 0),
    Snapshot: samples.commit([]).snapshot,
    Refusal: Refusal("a", "x", 0, 1, 0, 100, "too old"),
    Resume: Resume(1, 2),
    Heartbeat: samples.heartbeat(),
    TapeEntry: TAPE,
    Evaluation: Evaluation(1, 2, 3, 4.0, 5.0),
    Counters: Counters(1, 2, 3, 4, 5, 6, 7),
    Marker: Marker(3, 7),
    Note: Note(1.7e9, "a", "joined", "at round 7"),
    Handover: samples.handover(),
}


def strategy(annotation: Any) -> st.SearchStrategy[Any]:
    """Return values of one field, up to the bounds of its annotation."""
    if annotation == Name:
        return st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
    if annotation == Digest:
        return st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
    if annotation == Measure:
        return st.floats(-MEASURE_MAX, MEASURE_MAX) | st.just(math.nan)
    if annotation is bool:
        return st.booleans()
    if get_args(annotation)[0] == tuple[RoundMember, ...]:
        return st.lists(message(RoundMember), max_size=3).map(tuple)
    kind, *constraints = get_args(annotation)
    bounds = {type(constraint): constraint for constraint in constraints}
    if kind is str:
        return st.text(max_size=min(512, bounds[MaxLen].max_length))
    if kind is int:
        return st.integers(bounds[Ge].ge, bounds[Le].le)
    assert kind is float
    return st.floats(bounds[Ge].ge, bounds[Le].le)


def message(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: strategy(hint) for name, hint in get_type_hints(kind, include_extras=True).items()})


def same(one: Any, other: Any) -> bool:
    """Return whether two messages are equal bit for bit, where NaN equals NaN. `repr` of a float is exact."""
    return repr(one) == repr(other)


@pytest.mark.parametrize("kind", MESSAGES)
@given(data=st.data())
def test_every_message_survives_a_round_trip(kind: type[Any], data: st.DataObject) -> None:
    sent = data.draw(message(kind))
    fields = to_fields(sent)
    assert list(fields) == [f.name for f in dataclasses.fields(kind)]
    assert all(type(text) is str for text in fields.values())
    assert same(from_fields(kind, fields), sent)
    assert same(from_fields(kind, {"kind": "call", **fields, "new": "1"}), sent), "newer versions may add fields"


def test_the_text_of_a_contribution() -> None:
    fields = to_fields(samples.contribution(b"", farewell=True, data="17:0:96 4:3:0"))
    expected = "a x 0 1 0 0 100 4 4 2.5 1.0 1 float32 0 99aa06d3014798d86001c324468d497f 17:0:96 4:3:0"
    assert " ".join(fields.values()) == expected
    sent = replace(EXAMPLES[Evaluation], bits_per_byte=np.float64(1) / 3)
    assert to_fields(sent)["bits_per_byte"] == "0.3333333333333333", "numpy's scalars travel as numbers"


def test_members_are_readable_json() -> None:
    (member,) = json.loads(to_fields(TAPE)["members"])
    assert member["island"] == "a"
    assert member["weight"] == 1.0
    unknown = replace(TAPE.members[0], loss=math.nan)
    found = from_fields(TapeEntry, to_fields(replace(TAPE, members=(unknown,))))
    assert math.isnan(found.members[0].loss)
    members = [member, {**member, "island": "a b"}]
    assert ": members.1.island: " in refused(TapeEntry, {**to_fields(TAPE), "members": json.dumps(members)})


def refused(kind: type[Any], fields: dict[str, str]) -> str:
    with pytest.raises(WireError) as caught:
        from_fields(kind, fields)
    assert len(caught.value.reason) < 400
    return caught.value.reason


def test_a_missing_field_is_refused_by_name() -> None:
    for kind in MESSAGES:
        for name in [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]:
            fields = to_fields(EXAMPLES[kind])
            del fields[name]
            assert f": {name}: " in refused(kind, fields), (kind, name)


def wrong_values(annotation: Any) -> list[str]:
    """Return texts that the annotation must reject."""
    if annotation == Name:
        return ["", "-a", ".", "a/b", "a b", "a\n", "a\0", "ä", "{a}", "a:b", "*", "[red]a", "a" * 65]
    if annotation == Digest:
        return ["", "0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n", "g" * 32]
    if annotation is bool:
        return ["", "maybe", "2"]
    if annotation in (Seconds, Measure):
        wrong = ["", "x", "inf", "-Infinity", "1e999", "-1.1e150", "1,5"]
        return wrong if annotation == Measure else [*wrong, "nan", "-0.001", "1e10"]
    if get_args(annotation)[0] == tuple[RoundMember, ...]:
        member = json.loads(to_fields(TAPE)["members"])[0]
        bad_name, inf, short = {**member, "island": "a b"}, {**member, "weight": math.inf}, {**member}
        del short["clip"]
        wrong = [json.dumps([bad]) for bad in (bad_name, inf, short, 1, None, [member])]
        return [*wrong, "", "null", "5", "{}", "[", "[" * 100_000, '{"a":' * 100_000, "[" + "9" * 5000 + "]"]
    kind, *constraints = get_args(annotation)
    bounds: dict[Any, Any] = {type(constraint): constraint for constraint in constraints}
    if kind is str:
        return ["x" * (bounds[MaxLen].max_length + 1)]
    low, high = bounds[Ge].ge, bounds[Le].le
    if kind is int:
        return ["", "x", "1.5", "nan", "inf", "0x10", str(low - 1), str(high + 1), "9" * 5000]
    return ["", "x", "inf", "nan", str(low - 1.0), str(high * 1.001)]


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_wrong_field_is_refused_by_name(kind: type[Any]) -> None:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for value in wrong_values(hint):
            reason = refused(kind, {**to_fields(EXAMPLES[kind]), name: value})
            assert reason.startswith(f"{kind.__name__.lower()}: {name}"), value


def test_a_contribution_is_known_by_its_island_incarnation_and_sequence() -> None:
    one, other = samples.contribution(), samples.contribution(island="b", sequence=7)
    assert other.identity == ("b", "x", 7)
    assert replace(one, round=2, fragment=1, digest="0" * 32).identity == one.identity
    assert len({one.identity, replace(one, island="b").identity, replace(one, incarnation="b").identity}) == 3
    assert (one.identity_text, other.identity_text) == ("a/x/0", "b/x/7")
    snapshot = replace(EXAMPLES[Snapshot], merged=f"{one.identity_text} {other.identity_text}")
    assert from_fields(Snapshot, to_fields(snapshot)).identities == {one.identity_text, other.identity_text}
    assert replace(snapshot, merged="").identities == frozenset()
    assert Refusal(*other.identity, 1, 0, 100, "no").identity_text == other.identity_text
    assert {KINDS[kind]: kind for kind in EVENTS.values()} == EVENTS
