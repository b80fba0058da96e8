"""Text that `generate` makes from weights and from runs, and its mistakes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.commands import run
from archipelago.ops.weights.generate import show
from tests.ops.conftest import Call
from tests.ops.weights.small_runs import checkpointed, of_tokens


@pytest.mark.full
def test_a_seed_determines_the_generated_text(exported: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["generate", str(exported), "--prompt", "17 isl", "--tokens", "40", "--seed", "5"]
    status, text, _ = call(*flags)
    assert status == 0
    found = json.loads(call(*flags, "--json")[1])
    assert (found["tokens"], found["seed"], found["prompt"]) == (40, 5, "17 isl")
    assert len(found["text"]) <= 40
    show(found["text"] + "\n")
    assert capsys.readouterr().out == text
    assert call(*flags[:-1], "6")[1] != text


def test_control_characters_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    show("a\x1b[2J\tb\r\nc\x9b\x7fä")
    assert capsys.readouterr().out == "a\ufffd[2J\tb\ufffd\nc\ufffd\ufffdä"


def test_a_checkpoint_of_a_tokenised_corpus_generates_text(call: Call) -> None:
    checkpointed(of_tokens())
    status, out, _ = call("generate", "--run", "mine", "--tokens", "12", "--temperature", "0", "--prompt", "", "--json")
    assert status == 0
    assert json.loads(out)["tokens"] == 12
    assert json.loads(out)["text"]


def test_a_config_that_is_not_ours_is_refused(tmp_path: Path, exported: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    config = json.loads((exported / "config.json").read_text())
    changes: list[dict[str, Any]] = [
        {"model_type": "bert"},
        {"vocab_size": math.inf},
        {"num_hidden_layers": 10**9},
        {"model_type": "archipelago", "archipelago": {}},
    ]
    for changed in changes:
        (tmp_path / "out" / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ArchipelagoError) as caught:
            run(["generate", "out"])
        assert caught.value.code in {"weights.damaged", "export.foreign", "llama.damaged", "weights.unfit"}, changed
