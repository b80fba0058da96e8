"""A run's settings: defaults, invalid values and their errors, the digest, and the file formats."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import InnerConfig, RunConfig, checked, differences, from_json
from archipelago.broker.errors import ConfigError
from archipelago.ops.bench.accelerator import MEASURED, AcceleratorOptions
from archipelago.ops.commands import parse
from archipelago.ops.settings import config_file, to_toml
from tests.failing import failing

DEFAULTS = RunConfig()


def leaves(section: Any = DEFAULTS, prefix: str = "") -> dict[str, Any]:
    """Return `section.key: annotation` of every setting."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(type(section)).items():
        value = getattr(section, name, None)
        if dataclasses.is_dataclass(value):
            found |= leaves(value, f"{name}.")
        elif name != "__pydantic_config__":
            found[prefix + name] = hint
    return found


LEAVES = leaves()


def value_of(config: RunConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def with_value(key: str, value: object) -> dict[str, Any]:
    """Return the defaults as a mapping, with one setting changed."""
    values = dataclasses.asdict(DEFAULTS)
    *sections, name = key.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[name] = value
    return values


def another(key: str) -> object:
    """Return a valid value of a setting that is not its default."""
    hint, value = LEAVES[key], value_of(DEFAULTS, key)
    if value is None:
        return 0.5
    if get_origin(hint) is Literal:
        return next(option for option in get_args(hint) if option != value)
    if hint is bool:
        return not value
    if hint is str:
        return f"{value}-2"
    if key.endswith("_exponent"):
        return 0.5 - value
    return value + 1 if hint is int else value * 0.5 or 0.25


CONFIGS = st.builds(
    lambda seed, size, rate, warmup, rule, normalise, adopt: checked(
        with_value("model.size", size)
        | {
            "seed": seed,
            "inner": {"learning_rate": rate, "warmup_steps": warmup},
            "merge": {"rest": rule, "normalise": normalise},
            "adopt": {"rule": adopt},
        }
    ),
    st.integers(0, 2**31 - 1),
    st.text(),
    st.floats(0.0, 10.0, exclude_min=True),
    st.integers(0, 2**62),
    st.sampled_from(["average", "rda", "isotropic"]),
    st.booleans(),
    st.sampled_from(["carry", "overwrite"]),
)


def test_the_learning_rate_warms_up_and_falls_to_its_final_share() -> None:
    config = InnerConfig(steps=10, learning_rate=0.1, warmup_steps=4, final_share=0.1)
    rates = {0: 0.02, 2: 0.06, 4: 0.1, 7: 0.055, 10: 0.01, 1000: 0.01}
    assert {step: config.rate_at(step) for step in rates} == pytest.approx(rates)


@given(CONFIGS)
def test_json_and_toml_are_lossless(config: RunConfig) -> None:
    assert from_json(config.to_json()) == config
    assert from_json(config.to_json().encode()) == config
    assert checked(tomllib.loads(to_toml(config))) == config


def test_each_setting_is_part_of_the_identity() -> None:
    for key in LEAVES:
        value = another(key)
        changed = checked(with_value(key, value))
        assert value_of(changed, key) == value
        assert changed.digest() != DEFAULTS.digest(), key
        assert from_json(changed.to_json()) == changed
        assert differences(DEFAULTS, changed) == [f"{key}: {value_of(DEFAULTS, key)} → {value}"]
    ours = checked({"seed": 1, "sync": {"interval": 48, "window": 3}})
    assert differences(DEFAULTS, ours) == ["seed: 0 → 1", "sync.interval: 24 → 48", "sync.window: 2 → 3"]
    assert differences(ours, ours) == []


#: Values outside their bounds, or of another type.
WRONG = [
    ("seed", -1, "-1"),
    ("seed", "many", "'many'"),
    ("model", 3, "3"),
    ("model.size", 3, "3"),
    ("data.sequence_length", 1, "1"),
    ("data.shards", 2**21, "2097152"),
    ("inner.learning_rate", 0.0, "0.0"),
    ("inner.beta1", 1.0, "1.0"),
    ("sync.quorum", 0, "0"),
    ("sync.grace", -0.1, "-0.1"),
    ("merge.rest", "mean", "'mean'"),
    ("merge.normalise", "perhaps", "'perhaps'"),
]


def test_a_wrong_value_is_named_with_its_key() -> None:
    for key, value, shown in WRONG:
        with pytest.raises(ConfigError) as caught:
            pytest.fail(f"{key}: {checked(with_value(key, value), 'the test')}")
        what = caught.value.what
        assert what.startswith(f"the test cannot be used: {key}: ")
        assert what.endswith(f"not {shown}")
        assert "\n" not in str(caught.value)


def test_overwrite_and_a_codec_that_leaves_most_of_the_progress_out_are_refused() -> None:
    overwrite = {"adopt": {"rule": "overwrite"}}
    with failing(ConfigError, "config.value"):
        checked(overwrite | {"wire": {"up": "top3"}})
    assert checked(overwrite).thin == ""
    assert checked({}).thin == "top3"


def test_settings_must_be_finite() -> None:
    for key in [key for key in LEAVES if isinstance(value_of(DEFAULTS, key), float)]:
        for value in (math.nan, math.inf, -math.inf):
            with failing(ConfigError, "config.value") as caught:
                from_json(json.dumps(with_value(key, value)))
            assert key in str(caught.value)


def test_every_unknown_key_and_every_fault_is_named_at_once() -> None:
    for key in ("colour", "sync.intervall", "merge.rule"):
        with failing(ConfigError, "config.unknown-key") as caught:
            checked(with_value(key, 1))
        assert key in str(caught.value)
    with failing(ConfigError, "config.unknown-key") as caught:
        checked({"seed": -1, "sync": {"interval": 0, "speed": 9}})
    assert all(key in str(caught.value) for key in ("seed", "sync.interval", "sync.speed"))


def test_the_file_gives_the_defaults_of_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 9", encoding="utf-8")
    assert config_file(["init", "--run", "a"]) is None
    assert (
        config_file(["init", "--config", str(path)]) == config_file([f"--config={path}", "init"]) == RunConfig(seed=9)
    )
    with failing(ConfigError, "config.value"):
        config_file(["init", "--config"])
    measured = partial(parse, AcceleratorOptions, "archipelago bench accelerator")
    assert measured([]).settings == MEASURED, "a verb may have settings of its own"
    assert measured(["--config", str(path)]).settings == RunConfig(seed=9)
