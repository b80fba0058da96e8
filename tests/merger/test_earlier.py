"""Checkpoints of earlier versions: a run goes on from them, with the settings that this version knows."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.merger.earlier import taken_over
from archipelago.merger.state import RunState
from tests import samples

#: What version 0.2 wrote, as far as it matters.
STATE = {"closed": 30, "step": 60, "tokens": 900, "merged": 61, "seen": {"a/x": {"floor": 4}}, "refused": {"far": 1}}
BOOKS = {"merged": "61", "merged_tokens": "900", "refused": "1", "refused_tokens": "5", "bytes_up": "77", "kept": "61"}


def fields(**changes: Any) -> dict[str, Any]:
    """Return the fields of a checkpoint of version 0.2, whose run had settings that are gone or have other values."""
    manifest = samples.manifest().to_fields()
    config = json.loads(manifest["config"])
    config["sync"]["moments"] = "local"
    config["model"]["rematerialise"] = False
    config["outer"]["momentum"] = 0.8
    config["inner"]["learning_rate"] = "fast"
    manifest |= {"config": json.dumps(config), "config_digest": "of another version"}
    written = {"manifest": manifest, "state": json.dumps(STATE), "books": BOOKS, "cursors": {"20": [0, 992]}}
    return written | {"tape": ["kept"], "pending": ["lost"]} | changes


def test_a_run_goes_on_from_a_checkpoint_of_version_0_2(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = taken_over(fields())
    assert "inner.learning_rate, model.rematerialise, sync.moments" in caplog.text
    config = Manifest.from_fields(found["manifest"]).config
    assert config.outer.momentum == 0.8
    state = RunState.from_json(found["state"])
    assert (state.closed, state.step, state.counts()["merged_tokens"]) == (30, 60, 900)
    assert state.cursors == {"20": (0, 992)}
    assert (found["tape"], found["pending"], found["counters"]["refused"]) == (["kept"], [], "0")


def test_what_no_version_wrote_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"state": "{}"}, {"state": "no JSON"}, {"books": {}}, {"cursors": {"20": 5}}]
    for changes in wrong:
        with pytest.raises(WireError):
            taken_over(fields(**changes))
    with pytest.raises(ConfigError):
        taken_over(fields(manifest=samples.manifest().to_fields() | {"config": "[]"}))
