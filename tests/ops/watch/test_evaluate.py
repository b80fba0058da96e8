"""`archipelago evaluate`: it measures the newest parameters on held-out text, and records the result with the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import BrokerError
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.preparation import prepare_text
from archipelago.ops.commands import run
from archipelago.ops.launch.init import create
from tests.failing import failing
from tests.small import SMALL

CONFIG = replace(SMALL, data=replace(SMALL.data, corpus="text"))


def prepare(line: str) -> None:
    source = Path("source.txt")
    source.write_text(line * 4000, encoding="utf-8")
    prepare_text(source, "text")


def test_evaluate_measures_and_records_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    url = f"fakeredis://{tmp_path.name}"
    prepare("One line of the text after another.\n")
    transport = connect(url, "mine")
    create(transport, CONFIG)
    capsys.readouterr()

    assert run(["evaluate", url, "--run", "mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (recorded,) = transport.reader.evaluations()
    assert (found["run"], found["round"], found["unit"]) == ("mine", 0, "bits per byte")
    assert found["held_out"] == recorded.bits_per_byte == pytest.approx(8.0, abs=0.5)  # The parameters are random.
    assert (recorded.round, recorded.tokens, recorded.by) == (0, 0, "")

    assert run(["evaluate", url, "--run", "mine"]) == 0
    assert capsys.readouterr().out == f"{recorded.bits_per_byte:.4f} bits per byte on held-out text at round 0\n"
    assert transport.reader.evaluations() == [recorded]
    assert run(["generate", url, "--run", "mine", "--tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] == 3

    shutil.rmtree(tmp_path / "data" / "text")
    prepare("Another text under the same name.\n")
    with failing(BrokerError, "broker.other-corpus"):
        run(["evaluate", url, "--run", "mine"])
    transport.close()
