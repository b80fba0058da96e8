"""The speed of a machine: what scales with it, and that it is measured."""

from __future__ import annotations

import sys

import pytest

from archipelago.ops.simulation.machine import Machine, measured_machine, new_memory_seconds


def test_work_and_new_memory_have_prices_of_their_own() -> None:
    machine = Machine(slowness=2.0, new_byte_seconds=1e-9)
    assert machine.seconds(3.0) == 6.0
    assert machine.seconds(3.0, new_bytes=5e9) == pytest.approx(11.0)
    assert machine.slower(2.0) == Machine(4.0, 2e-9)


def test_this_machine_takes_time_for_both() -> None:
    found = measured_machine()
    assert found.slowness > 0.0
    assert found.new_byte_seconds > 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts page faults alike")
def test_every_page_is_new() -> None:
    import resource

    size = 16 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    new_memory_seconds(size)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before >= size // (2 << 20), "pages have 2 MiB at most"
