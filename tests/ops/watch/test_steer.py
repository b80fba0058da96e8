"""`archipelago steer`: its changes, its output, its errors, and steered runs in virtual time."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from functools import partial

import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.control import GRACE, OUTER_RATE, QUORUM
from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.watch.steer import changes_of
from tests import samples
from tests.ops.conftest import Call

CONFIG = RunConfig()


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


@pytest.fixture
def transport(url: str) -> Iterator[RedisTransport]:
    """Return a run `demo` with an island `oslo`."""
    made = samples.begin(connect(url, "demo"))
    made.island.heartbeat(samples.heartbeat("oslo"))
    yield made
    made.close()


@pytest.fixture
def call(call: Call) -> Call:
    """Run `archipelago steer`."""
    return partial(call, "steer")


def test_all_changes_at_once(call: Call, url: str, transport: RedisTransport) -> None:
    changes = [f"{OUTER_RATE}=0.5", f"{QUORUM}=3", "merging=paused", "island.oslo=drain", "checkpoint"]
    status, out, err = call(url, "--run", "demo", *changes, "--json")
    assert (status, err) == (0, "")
    found = transport.reader.control()
    assert found.pop("checkpoint").startswith("asked at 1")
    assert found == {OUTER_RATE: "0.5", QUORUM: "3", "merging": "paused", "island.oslo": "drain"}
    shown = json.loads(out)
    assert (shown["set"][OUTER_RATE], shown["own"][OUTER_RATE], shown["ignored"]) == ("0.5", 0.7, {})
    assert GRACE in shown["own"].keys() - shown["set"].keys()


def test_without_changes_it_shows_the_present_changes(call: Call, url: str, transport: RedisTransport) -> None:
    wishes = {OUTER_RATE: "0.5", "island.oslo": "expel", "sync.quorum": "many", "merging": "paused"}
    transport.reader.steer(wishes)
    status, out, err = call(url)
    assert (status, err) == (0, "")
    asked, settings = out.splitlines()
    assert asked.startswith(f"merging is paused, {OUTER_RATE} = 0.5, oslo is expelled, {QUORUM} is ignored (")
    assert "'many'" in asked
    assert f"{OUTER_RATE} = 0.7" in settings
    assert transport.reader.control() == wishes
    transport.reader.steer(dict.fromkeys(wishes, ""))
    assert call(url)[1].startswith("nothing is steered\n")


def test_a_name_without_a_value_removes_a_change(
    call: Call, url: str, transport: RedisTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.reader.steer({OUTER_RATE: "0.5", "merging": "paused", "rubbish": "1"})
    assert call(url, "outer.learning-rate=", "merging=", "rubbish=")[0] == 0
    assert transport.reader.control() == {}
    monkeypatch.setenv("ARCHIPELAGO_URL", url)
    assert call("merging=paused")[0] == 0
    assert call("checkpoint", "sync.quorum=2")[0] == 0
    assert transport.reader.control().keys() == {"merging", "checkpoint", QUORUM}


def test_an_unknown_island_is_a_warning(call: Call, url: str, transport: RedisTransport) -> None:
    status, _, err = call(url, "island.olso=drain")
    assert status == 0
    assert {"olso", "oslo"} <= set(re.findall(r"\w+", err))
    assert transport.reader.control() == {"island.olso": "drain"}
    assert call(url, "island.oslo=drain")[2] == ""


def test_every_request_for_a_checkpoint_is_a_new_one() -> None:
    seconds = iter((1.0, 1.5))
    first, second = (changes_of(CONFIG, ["checkpoint"], {}, lambda: next(seconds)) for _ in range(2))
    assert first["checkpoint"] != second["checkpoint"]
    assert changes_of(CONFIG, ["checkpoint=mine"], {}, lambda: 0.0) == {"checkpoint": "mine"}
    with pytest.raises(ConfigError):
        changes_of(CONFIG, ["checkpoint=" + "x" * 99], {}, lambda: 0.0)
