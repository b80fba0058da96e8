"""`bench sync`: a torchft that is missing, replaced or ends."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from archipelago.broker.errors import BrokerError
from archipelago.ops.bench import sync as bench_sync
from archipelago.ops.bench.sync import torchft
from archipelago.ops.bench.two_islands import Synced, SyncSize, TwoIslands
from tests.failing import failing

TINY = SyncSize(parameters=12_000, rounds=2)
STAND_IN = """#!/bin/sh
echo '{"torchft": "9.9", "torch": "9.9"}'
while read -r line; do
    echo '{"seconds": 2.0, "committed": false, "errors": []}'
done
"""


def _script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def test_tensors_have_one_shape() -> None:
    assert sum(tensor.size for tensor in SyncSize().tensors) == pytest.approx(10e6, rel=1e-3)
    assert sum(tensor.size for tensor in TINY.tensors) == 12_000


class FakeIslands:
    """Two islands without processes, of which the first syncs are slow."""

    def __init__(self) -> None:
        self.left = [*[(9.0, True)] * bench_sync.WARM_UPS, (4.0, True), (1.0, True)]

    def sync(self) -> Synced:
        return Synced(*self.left.pop(0), megabytes=10.0)


def test_both_sides_take_turns_and_warm_ups_do_not_count(tmp_path: Path) -> None:
    with torchft(TINY, _script(tmp_path, STAND_IN)) as other:
        ours, theirs = bench_sync._turns(TINY, cast(TwoIslands, FakeIslands()), other)
    assert (theirs["what"], theirs["seconds"], theirs["committed"]) == ("torchft 9.9", 2.0, "0 of 2")
    assert (ours["seconds"], ours["from"], ours["to"], ours["committed"]) == (2.5, 1.0, 4.0, "2 of 2")
    assert ours["MB"] == 10.0
    assert ours["speed_to_torchft"] == (2.0 / 4.0 + 2.0 / 1.0) / 2


def test_a_python_without_torchft_is_named(tmp_path: Path) -> None:
    fails = _script(tmp_path, "#!/bin/sh\necho \"No module named 'torchft'\" >&2\nexit 1\n")
    for python, said in ((fails, "No module named 'torchft'"), ("/no/such/python", "/no/such/python")):
        with torchft(TINY, python) as found:
            assert not found.usable
            assert said in found.reason


def test_a_torchft_that_ends_is_an_error(tmp_path: Path) -> None:
    ends = _script(tmp_path, '#!/bin/sh\necho \'{"torchft": "9.9"}\'\nread -r line\nexit 3\n')
    with torchft(TINY, ends) as found, failing(BrokerError, "bench.process-failed"):
        found.sync()
