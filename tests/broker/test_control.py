"""The operator's requests: valid fields, their text, and the safe parsing of any other text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import OuterConfig, RunConfig, SyncConfig, checked
from archipelago.broker.control import (
    DRAIN,
    EXPEL,
    FIELDS_MAX,
    GRACE,
    OUTER_RATE,
    QUORUM,
    SETTINGS,
    VALUE_MAX,
    Control,
    after_changes,
    changes_text,
    checked_changes,
    fields_in,
    in_force,
    is_expelled,
    require_welcome,
    steered,
)
from archipelago.broker.errors import ConfigError, WireError
from tests.failing import failing

CONFIG = RunConfig(outer=OuterConfig(learning_rate=0.7), sync=SyncConfig(quorum=2, grace=0.5))
RATES = st.floats(0.0, 10.0, exclude_min=True)
VALUES = st.fixed_dictionaries({}, optional={OUTER_RATE: RATES, QUORUM: st.integers(1, 99), GRACE: st.floats(0.0, 1.0)})


def test_all_requests_are_parsed() -> None:
    fields = {
        OUTER_RATE: "0.5", QUORUM: "3", GRACE: "0.25", "merging": "paused", "checkpoint": "now", "island.oslo": DRAIN,
        "island.paris": EXPEL,
    }  # fmt: skip
    control = Control.of(fields)
    assert control.settings == {OUTER_RATE: 0.5, QUORUM: 3, GRACE: 0.25}
    assert (control.is_paused, control.checkpoint, control.faults) == (True, "now", {})
    assert control.islands == {"oslo": DRAIN, "paris": EXPEL}
    assert control.expelled == {"paris"}
    assert control.fields == fields == checked_changes(CONFIG, fields)
    assert not Control.of({}).is_paused


def test_numbers_are_written_in_one_way_and_an_empty_value_removes_a_field() -> None:
    for given_value, written in (("0.50", "0.5"), ("5e-1", "0.5"), ("1", "1.0"), (" 0.5", "0.5")):
        assert checked_changes(CONFIG, {"outer.learning-rate": given_value}) == {OUTER_RATE: written}
    nothing = {OUTER_RATE: "", "merging": "", "checkpoint": "", "island.oslo": ""}
    assert checked_changes(CONFIG, nothing) == nothing


INVALID = [
    (OUTER_RATE, "0", "control.value"),
    (OUTER_RATE, "11", "control.value"),
    (OUTER_RATE, "nan", "control.value"),
    (OUTER_RATE, "fast", "control.value"),
    (QUORUM, "0", "control.value"),
    (QUORUM, "1.5", "control.value"),
    (GRACE, "1.1", "control.value"),
    ("merging", "on", "control.value"),
    ("island.oslo", "leave", "control.value"),
    ("island.o/o", DRAIN, "config.name"),
    ("island.", DRAIN, "config.name"),
    ("inner.learning_rate", "0.1", "control.value"),
    ("merge", "", "control.value"),
    ("checkpoint", "x" * (VALUE_MAX + 1), "control.value"),
    ("checkpoint", "a\nb", "control.value"),
]


def test_an_invalid_change_is_refused() -> None:
    for name, value, code in INVALID:
        with failing(ConfigError, code):
            checked_changes(CONFIG, {name: value})
        control = Control.of({name: value})
        assert name in control.faults, (name, value)
        assert name not in control.fields, (name, value)


@given(
    st.dictionaries(
        st.sampled_from([*SETTINGS, "merging", "checkpoint", "island.a", "island.a/b"]),
        st.text(max_size=80)
        | st.floats().map(repr)
        | st.integers().map(str)
        | st.sampled_from(["paused", DRAIN, EXPEL]),
    )
)
def test_parsed_values_are_in_range(fields: dict[str, str]) -> None:
    control = Control.of(fields)
    checked(steered(CONFIG, in_force(CONFIG, {}, control)))
    assert set(control.islands.values()) <= {DRAIN, EXPEL}
    assert Control.of(control.fields) == replace(control, faults={})
    assert control.fields.keys() | control.faults.keys() == fields.keys()


def test_at_most_fields_max_fields_are_parsed() -> None:
    control = Control.of({f"island.i{n}": EXPEL for n in range(FIELDS_MAX + 1)})
    assert len(control.islands) == FIELDS_MAX
    assert list(control.faults.values()) == [f"{FIELDS_MAX + 1} fields, of which {FIELDS_MAX} are read"]


# -- settings in force ---------------------------------------------------------------------------------


def test_settings_in_force_differ_from_the_config_and_unreadable_ones_stay() -> None:
    control = Control.of({OUTER_RATE: "0.7", QUORUM: "3"})
    assert in_force(CONFIG, {GRACE: 0.1}, control) == {QUORUM: 3}
    control = Control.of({OUTER_RATE: "fast", QUORUM: "3"})
    assert in_force(CONFIG, {OUTER_RATE: 0.25, GRACE: 0.1}, control) == {OUTER_RATE: 0.25, QUORUM: 3}


@given(st.lists(VALUES, max_size=6))
def test_changes_on_the_tape_restore_settings_exactly(wishes: list[dict[str, float]]) -> None:
    live: dict[str, float] = {}
    replayed: dict[str, float] = {}
    for wish in wishes:
        fields = checked_changes(CONFIG, {name: repr(value) for name, value in wish.items()})
        after = in_force(CONFIG, live, Control.of(fields))
        replayed = after_changes(CONFIG, replayed, changes_text(CONFIG, live, after))
        live = after
        assert replayed == live
        assert steered(CONFIG, replayed) == steered(CONFIG, wish)


def test_an_invalid_change_on_the_tape_is_refused() -> None:
    for text in ("outer.learning_rate=0", "inner.steps=0", "data.shards=3", "x", "sync.quorum=", "=1"):
        with failing(WireError, "wire.message"):
            pytest.fail(f"{text}: {after_changes(CONFIG, {}, text)}")


def test_a_state_without_requests_has_no_fields() -> None:
    for state in ("", "{", "[]", "null", '{"control": 3}', '{"control": {"merging": "no"}}', "[" * 9999):
        assert fields_in(state) == {}, state


# -- islands ----------------------------------------------------------------------------------


def test_a_drained_or_expelled_island_cannot_join() -> None:
    for wish in (DRAIN, EXPEL):
        fields = {"island.oslo": wish}
        with failing(ConfigError, "control.unwelcome") as caught:
            require_welcome(fields, "oslo", "demo")
        assert "archipelago steer URL --run demo island.oslo=" in caught.value.remedy
        require_welcome(fields, "osl", "demo")
    require_welcome({"island.oslo": "nonsense"}, "oslo", "demo")


def test_expelling_an_island_covers_all_its_incarnations() -> None:
    fields = {"island.a": EXPEL, "island.b": DRAIN}
    assert is_expelled(fields, "a/x")
    assert is_expelled(fields, "a/y")
    assert not is_expelled(fields, "b/x")
    assert not is_expelled(fields, "aa/x")
