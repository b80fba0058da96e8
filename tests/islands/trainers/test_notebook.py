"""The notebook of the examples, run as a user runs it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import pytorch
from tests.islands.user_loop.any_framework import served

for package in ("torch", "accelerate", "ipykernel"):
    pytorch.required(package)
transformers = pytorch.required("transformers")
nbclient, nbformat = pytorch.required("nbclient"), pytorch.required("nbformat")

pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

NOTEBOOK = Path(__file__).parents[3] / "docs" / "examples" / "trainer.ipynb"
#: The test trains for fewer steps than the notebook.
STEPS = 60


def test_the_notebook_trains_to_the_end_of_the_run(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"notebook-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("ARCHIPELAGO_URL", server.url)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = NOTEBOOK.read_text().replace('\\"mine\\"', f'\\"{name}\\"').replace("steps=600", f"steps={STEPS}")
    notebook: Any = nbformat.reads(text, as_version=4)
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    model, sync = transformers.GPT2LMHeadModel(config), SyncConfig(interval=24, fragments=2)
    archipelago.pytorch.create(server.url, name, model, steps=STEPS, sync=sync)
    with served(server.url, name):
        nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert f"the run is at step {STEPS} of {STEPS}" in printed
    bars = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any(f"{STEPS}/{STEPS}" in bar for bar in bars), "the bar of notebooks follows the run's clock"
