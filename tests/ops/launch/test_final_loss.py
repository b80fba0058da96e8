"""The end of a run for `up` and storms: the held-out loss of its newest parameters is recorded with the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.redis.transport import connect
from archipelago.islands.data.preparation import prepare_text
from archipelago.ops.launch.final_loss import FinalLossOptions, main
from archipelago.ops.launch.init import create
from tests.small import SMALL

CONFIG = replace(SMALL, data=replace(SMALL.data, corpus="text"))


def test_the_newest_parameters_are_measured_and_the_result_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    url = f"fakeredis://{tmp_path.name}"
    Path("source.txt").write_text("One line of the text after another.\n" * 4000, encoding="utf-8")
    prepare_text(Path("source.txt"), "text")
    transport = connect(url, "mine")
    create(transport, CONFIG)
    assert main(FinalLossOptions(url, "mine")) == 0
    (recorded,) = transport.reader.evaluations()
    assert recorded.bits_per_byte == pytest.approx(8.0, abs=0.5)  # The parameters are random.
    assert (recorded.round, recorded.tokens, recorded.by) == (0, 0, "")
    transport.close()
