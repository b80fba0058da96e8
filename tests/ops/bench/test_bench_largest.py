"""The largest model that passes: a small one does, a wrong one is noticed, and one that does not fit is refused."""

from __future__ import annotations

import sys
import uuid
from dataclasses import replace

import numpy as np
import pytest

from archipelago.broker.codecs import codec
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import Snapshot
from archipelago.islands.sync.link import Arrival
from archipelago.ops.bench.largest import RATE, _create, _manifest, _Way, largest, needed_bytes, require_room


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_every_fragment_goes_up_is_merged_and_comes_down_once() -> None:
    fragments = 5
    found = largest(4999 * fragments - 3, lambda _: None, fragments)
    assert (found["parameters"], found["fragments"]) == (4999 * fragments, fragments)
    for part in ("publish_seconds", "merge_seconds", "adopt_seconds"):
        assert len(found[part]) == fragments
        assert min(found[part]) > 0
    most = codec("int4").encoded_size(4999) * fragments
    assert 0.5 * most < found["bytes_up"] < 1.1 * most + 100 * fragments
    assert found["bytes_down"] > 4999 * fragments  # bfloat16 after zstd
    assert set(found["peak_bytes"]) == {"island", "merger", "Redis"}
    assert min(found["peak_bytes"].values()) > 1 << 20
    together = next(row for row in found["rows"] if row["what"] == "publish, merge and adopt")
    parts = [sum(found[part]) for part in ("publish_seconds", "merge_seconds", "adopt_seconds")]
    assert together["seconds"] == pytest.approx(sum(parts))


def test_what_comes_down_is_compared_with_what_was_merged() -> None:
    url, manifest = f"fakeredis://largest-{uuid.uuid4().hex}", _manifest(100, 3)
    first_N = np.linspace(-1, 1, 100, dtype=np.float32)
    assert _create(url, manifest, first_N) > 0
    way = _Way(url, manifest, first_N)
    sent_N = way._first_N - np.float32(0.01)
    merged_N = way._first_N - np.float32(RATE * 0.01)
    snapshot = Snapshot(3, 2, 1, 0, "bfloat16", 1, "0" * 32, merged="")
    way._require_merged(2, Arrival(snapshot, merged_N), sent_N)
    with pytest.raises(WireError, match="something else"):
        way._require_merged(2, Arrival(snapshot, merged_N + np.float32(0.1)), sent_N)
    with pytest.raises(WireError, match="version 0"):
        way._require_merged(2, Arrival(replace(snapshot, version=0), merged_N), sent_N)
    with pytest.raises(WireError, match="fragment 2 came instead of 1"):
        way._require_merged(1, Arrival(snapshot, merged_N), sent_N)


def test_a_model_that_does_not_fit_is_refused_with_the_largest_that_would() -> None:
    available = 8 << 30
    with pytest.raises(ConfigError) as refused:
        require_room(10**9, 128, available)
    largest_one = int(float(refused.value.remedy.rpartition("--parameters ")[2].rstrip(".)")))
    assert 10**8 < largest_one < 10**9
    require_room(largest_one, 128, available)
    with pytest.raises(ConfigError):
        require_room(int(largest_one * 1.03), 128, available)
    with pytest.raises(ConfigError, match="Free some memory"):
        require_room(10**6, 128, 1 << 20)


def test_needs_grow_with_the_parameters_and_with_the_size_of_a_fragment() -> None:
    assert needed_bytes(10**9, 128) < needed_bytes(10**9, 16) < needed_bytes(2 * 10**9, 16)


@pytest.mark.parametrize("parameters", [0.0, -1.0, float("nan"), float("inf")])
def test_no_number_of_parameters_is_refused(parameters: float) -> None:
    with pytest.raises(ConfigError, match="--parameters"):
        largest(parameters, lambda _: None)
