"""A run's settings: defaults, invalid values and their errors, the digest, and the file formats."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import RunConfig, checked, differences, from_json, from_toml
from archipelago.broker.errors import ConfigError
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


def test_the_defaults_are_valid() -> None:
    assert checked(DEFAULTS) == DEFAULTS
    assert checked({}) == DEFAULTS
    assert len(LEAVES) > 30


@given(CONFIGS)
def test_json_is_lossless(config: RunConfig) -> None:
    assert from_json(config.to_json()) == config
    assert from_json(config.to_json().encode()) == config


@given(CONFIGS)
def test_toml_is_lossless(config: RunConfig) -> None:
    assert checked(tomllib.loads(to_toml(config))) == config


def test_a_toml_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    config = checked(with_value("data.corpus", 'Ärger "mit" \\ Zeichen\0\t\r\n\x1f\x7f\U0001f3dd'))
    path.write_text(to_toml(config), encoding="utf-8")
    assert from_toml(path) == config
    path.write_text("seed = 7\n[sync]\ninterval = 100\n", encoding="utf-8")
    assert from_toml(path) == checked({"seed": 7, "sync": {"interval": 100}})


@pytest.mark.parametrize("key", LEAVES)
def test_each_setting_is_part_of_the_identity(key: str) -> None:
    value = another(key)
    changed = checked(with_value(key, value))
    assert value_of(changed, key) == value
    assert changed.digest() != DEFAULTS.digest()
    assert from_json(changed.to_json()) == changed
    assert differences(DEFAULTS, changed) == [f"{key}: {value_of(DEFAULTS, key)} → {value}"]


def test_differences_of_several_settings_and_of_none() -> None:
    ours = checked({"seed": 1, "sync": {"interval": 48, "window": 3}})
    assert differences(DEFAULTS, ours) == ["seed: 0 → 1", "sync.interval: 24 → 48", "sync.window: 2 → 3"]
    assert differences(ours, ours) == []


def test_the_digest_is_the_same_in_every_process() -> None:
    code = "from archipelago.broker.config import RunConfig; print(RunConfig().digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == DEFAULTS.digest()
    assert len(DEFAULTS.digest()) == 16


def test_the_digest_does_not_depend_on_how_the_config_was_written() -> None:
    assert DEFAULTS.to_json() == json.dumps(json.loads(DEFAULTS.to_json()), sort_keys=True)
    shuffled = dict(reversed(json.loads(DEFAULTS.to_json()).items()))
    assert from_json(json.dumps(shuffled, indent=3)).digest() == DEFAULTS.digest()
    assert checked({"inner": {"clip_norm": 1}}).digest() == DEFAULTS.digest()


WRONG = [
    ("seed", -1, "-1"),
    ("seed", 2**31, "2147483648"),
    ("seed", 1.5, "1.5"),
    ("seed", "many", "'many'"),
    ("seed", None, "None"),
    ("model", 3, "3"),
    ("model.size", 3, "3"),
    ("data.sequence_length", 1, "1"),
    ("data.batch_size", 0, "0"),
    ("data.shards", 2**21, "2097152"),
    ("inner.steps", 0, "0"),
    ("inner.learning_rate", 0.0, "0.0"),
    ("inner.learning_rate", 10.1, "10.1"),
    ("inner.final_share", 1.01, "1.01"),
    ("inner.beta1", 1.0, "1.0"),
    ("inner.clip_norm", -0.5, "-0.5"),
    ("sync.interval", 0, "0"),
    ("sync.fragments", 0, "0"),
    ("sync.window", 0, "0"),
    ("sync.quorum", 0, "0"),
    ("sync.grace", -0.1, "-0.1"),
    ("sync.smoothing", 1.0, "1.0"),
    ("sync.staleness_cap", -1, "-1"),
    ("merge.rest", "mean", "'mean'"),
    ("merge.staleness", "linear", "'linear'"),
    ("merge.normalise", "perhaps", "'perhaps'"),
    ("outer.rule", "adam", "'adam'"),
    ("outer.momentum", 1.0, "1.0"),
    ("adopt.rule", "ignore", "'ignore'"),
    ("wire.up", "int2", "'int2'"),
    ("wire.zstd_level", 20, "20"),
]


@pytest.mark.parametrize(("key", "value", "shown"), WRONG)
def test_a_wrong_value_is_named_with_its_key(key: str, value: object, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(with_value(key, value), "the test")
    what = caught.value.what
    assert what.startswith(f"the test cannot be used: {key}: ")
    assert what.endswith(f"not {shown}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [key for key, hint in LEAVES.items() if isinstance(value_of(DEFAULTS, key), float)])
def test_settings_must_be_finite(key: str, value: float) -> None:
    with failing(ConfigError, "config.value") as caught:
        from_json(json.dumps(with_value(key, value)))
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["colour", "sync.intervall", "merge.rule"])
def test_an_unknown_key_is_named(key: str) -> None:
    with failing(ConfigError, "config.unknown-key") as caught:
        checked(with_value(key, 1))
    assert key in str(caught.value)


def test_every_fault_is_named_at_once() -> None:
    with failing(ConfigError, "config.unknown-key") as caught:
        checked({"seed": -1, "sync": {"interval": 0, "speed": 9}})
    assert all(key in str(caught.value) for key in ("seed", "sync.interval", "sync.speed"))


@pytest.mark.parametrize("text", ["", "{", "null", "7", "[]", '"text"', "[" * 100_000, b"\xff\xfe", '{"seed": NaN}'])
def test_text_that_is_not_a_config_is_an_error(text: str | bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert caught.value.code in ("config.not-json", "config.value")


@pytest.mark.parametrize(
    ("text", "code", "key"),
    [
        ("seed = ", "config.not-toml", ""),
        ("seed = 1\nseed = 2", "config.not-toml", ""),
        ("speed = 3", "config.unknown-key", "speed"),
        ("[sync]\nintervall = 3", "config.unknown-key", "sync.intervall"),
        ("[sync]\ninterval = 0", "config.value", "sync.interval"),
        ("[inner]\nlearning_rate = nan", "config.value", "inner.learning_rate"),
        ("sync = 3", "config.value", "sync"),
    ],
)
def test_a_toml_file_that_cannot_be_used(tmp_path: Path, text: str, code: str, key: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with failing(ConfigError, code) as caught:
        from_toml(path)
    assert str(path) in str(caught.value)
    assert key in str(caught.value)


def test_a_toml_file_that_cannot_be_read(tmp_path: Path) -> None:
    with failing(ConfigError, "config.unreadable"):
        from_toml(tmp_path / "none.toml")
    with failing(ConfigError, "config.unreadable"):
        from_toml(tmp_path)
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[data]\ncorpus = "\xe4"')
    with failing(ConfigError, "config.not-toml"):
        from_toml(path)


def test_the_file_gives_the_defaults_of_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 9", encoding="utf-8")
    assert config_file(["init", "--run", "a"]) == DEFAULTS
    assert config_file(["init", "--config", str(path)]).seed == 9
    assert config_file([f"--config={path}", "init"]).seed == 9
    with failing(ConfigError, "config.no-path"):
        config_file(["init", "--config"])
