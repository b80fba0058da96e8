"""What `init` and `up` say about the cost of merging before a run begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.ops.launch.init import tell_of_spectra
from tests import samples

WIDE = (Tensor("kernel", (20, 1024, 4096)),)


def test_spectra_that_take_long_are_told_when_a_run_is_created(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    manifest = samples.manifest("sample")
    isotropic = replace(manifest.config, merge=MergeConfig(rest="isotropic"))
    by_rda = replace(manifest.config, merge=MergeConfig(embedding="average", rest="rda"))
    tell_of_spectra(replace(manifest, tensors=WIDE, config=by_rda))
    tell_of_spectra(replace(manifest, config=isotropic))
    assert not capsys.readouterr().err, "it is quick"
    tell_of_spectra(replace(manifest, tensors=WIDE, config=isotropic))
    assert "spectra" in capsys.readouterr().err
