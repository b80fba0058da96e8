"""How long an accelerator waits, by a profile, and how much of its copies passes beside programs."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from archipelago.ops.bench.profile import DeviceTimes, device_times, joined

#: A GPU as CUDA's profile describes it: two copies to and from the host, one within the device, and three programs.
GPU = """
planes { name: "/device:GPU:0"
  lines { id: 1 name: "Stream #13(MemcpyH2D)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 2000000 duration_ps: 6000000 } }
  lines { id: 2 name: "Stream #14(MemcpyD2H)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 20000000 duration_ps: 2000000 } }
  lines { id: 3 name: "Stream #7(Compute)" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 4 offset_ps: 3000000 duration_ps: 2000000 }
    events { metadata_id: 3 offset_ps: 7000000 duration_ps: 9000000 } }
  lines { id: 4 name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 3 offset_ps: 0 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "MemcpyH2D" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2H" } }
  event_metadata { key: 3 value { id: 3 name: "loop_fusion" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyD2D" } } }
planes { name: "/host:CPU" lines { id: 9 name: "Stream of words" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 0 duration_ps: 50000000 } }
  event_metadata { key: 1 value { id: 1 name: "MemcpyH2D" } } }
"""


def test_copies_between_host_and_device_count_where_a_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_times(tmp_path) is None
    whole = jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/one.xplane.pb").write_bytes(whole)
    # The first copy lasts from 2 to 8 µs, programs from 0 to 5 and from 7 to 16. The second copy is alone.
    expected = DeviceTimes(copies=8e-6, hidden=4e-6, whole=16e-6, waits=0.0)
    assert device_times(tmp_path) == pytest.approx(expected)
    monkeypatch.setattr("archipelago.ops.bench.profile.GAP_NS", 2000.0)
    assert device_times(tmp_path) == pytest.approx(expected._replace(waits=2e-6))


def test_a_profile_of_a_cpu_has_no_copies(tmp_path: Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        (jax.device_put(1.0) + 1.0).block_until_ready()
    assert device_times(tmp_path) is None


def test_programs_that_overlap_count_once() -> None:
    assert joined([(5, 7), (1, 3), (2, 6), (9, 30), (30, 31)]) == [(1, 7), (9, 31)]
