"""`bench largest`: a small model passes, wrong values are noticed, and a model that does not fit is refused."""

from __future__ import annotations

import sys
import uuid
from dataclasses import replace

import numpy as np
import pytest

from archipelago.broker.codecs import codec
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import Snapshot
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.ops.bench.largest import RATE, _create, _IslandEnd, _manifest, largest, needed_bytes, require_room
from tests.failing import failing


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_every_fragment_is_published_merged_and_adopted_once() -> None:
    fragments = 5
    found = largest(4999 * fragments - 3, lambda _: None, fragments)
    assert (found["parameters"], found["fragments"]) == (4999 * fragments, fragments)
    for part in ("publish_seconds", "merge_seconds", "adopt_seconds"):
        assert len(found[part]) == fragments
        assert min(found[part]) > 0
    most = codec("int4").encoded_size(4999) * fragments
    assert 0.5 * most < found["bytes_up"] < 1.1 * most + 100 * fragments
    assert found["bytes_down"] > 4999 * fragments  # The snapshots are bfloat16, compressed by zstd.
    assert set(found["peak_bytes"]) == {"island", "merger", "Redis"}
    assert min(found["peak_bytes"].values()) > 1 << 20
    together = next(row for row in found["rows"] if row["what"] == "publish, merge and adopt")
    parts = [sum(found[part]) for part in ("publish_seconds", "merge_seconds", "adopt_seconds")]
    assert together["seconds"] == pytest.approx(sum(parts))


def test_a_snapshot_with_other_values_or_versions_is_noticed() -> None:
    url, manifest = f"fakeredis://largest-{uuid.uuid4().hex}", _manifest(100, 3)
    first_N = np.linspace(-1, 1, 100, dtype=np.float32)
    assert _create(url, manifest, first_N) > 0
    end = _IslandEnd(url, manifest, first_N)
    sent_N = end._first_N - np.float32(0.01)
    merged_N = end._first_N - np.float32(RATE * 0.01)
    snapshot = Snapshot(3, 2, 1, 0, "bfloat16", 1, "0" * 32, merged="")
    end._require_merged(2, Arrival(snapshot, merged_N), sent_N)
    with failing(WireError, "bench.wrong-values"):
        end._require_merged(2, Arrival(snapshot, merged_N + np.float32(0.1)), sent_N)
    with failing(WireError, "bench.wrong-version"):
        end._require_merged(2, Arrival(replace(snapshot, version=0), merged_N), sent_N)
    with failing(WireError, "bench.wrong-version"):
        end._require_merged(1, Arrival(snapshot, merged_N), sent_N)


def test_a_model_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    available = 8 << 30
    with failing(ConfigError, "bench.memory") as refused:
        require_room(10**9, 128, available)
    largest_one = int(float(refused.value.remedy.rpartition("--parameters ")[2].rstrip(".)")))
    assert 10**8 < largest_one < 10**9
    require_room(largest_one, 128, available)
    with failing(ConfigError, "bench.memory"):
        require_room(int(largest_one * 1.03), 128, available)
    with failing(ConfigError, "bench.memory"):
        require_room(10**6, 128, 1 << 20)


def test_memory_grows_with_the_parameters_and_with_the_size_of_a_fragment() -> None:
    assert needed_bytes(10**9, 128) < needed_bytes(10**9, 16) < needed_bytes(2 * 10**9, 16)


@pytest.mark.parametrize("parameters", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_number_of_parameters_is_refused(parameters: float) -> None:
    with failing(ConfigError, "bench.parameters"):
        largest(parameters, lambda _: None)
