"""A run is continued with its own settings or extended, and others are refused by name; its loss is measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.config import InnerConfig, MergeConfig, ModelConfig, RunConfig, WireConfig, flags
from archipelago.broker.control import STEPS
from archipelago.broker.errors import MismatchError
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.merger.storage import MergerFolder
from archipelago.ops.commands import parse
from archipelago.ops.launch import up
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.launch.init import InitOptions, create
from archipelago.ops.launch.up import UpOptions
from tests.failing import failing
from tests.small import SMALL

CONFIG = replace(SMALL, data=replace(SMALL.data, corpus="small-text"))


@pytest.fixture
def transport(corpus: OpenCorpus, tmp_path: Path) -> Iterator[Transport]:
    """Return a connection to the run `mine`, which exists."""
    made = connect(f"fakeredis://{tmp_path.name}", "mine")
    create(made, CONFIG)
    yield made
    made.close()


def continued(transport: Transport, config: RunConfig, folder: Path) -> None:
    """Continue the run as `archipelago up` does."""
    kept = MergerFolder(folder / "mine" / "merger")
    manifest, created = up._find_or_create(transport, config, kept, UpOptions(run="mine", folder=folder))
    assert (manifest.config.inner.steps, created) == (CONFIG.inner.steps, False)


def test_other_settings_are_named_and_the_runs_own_go_on(transport: Transport, tmp_path: Path) -> None:
    with failing(MismatchError, "config.other-settings"):
        create(transport, replace(CONFIG, seed=7))
    with failing(MismatchError, "config.other-settings") as failure:
        continued(transport, replace(CONFIG, model=ModelConfig("small")), tmp_path)
    assert isinstance(failure.value, MismatchError)
    assert failure.value.subject == "model.size", "its learning rate follows from the model"
    other = replace(CONFIG, seed=7, inner=replace(CONFIG.inner, weight_decay=0.2))
    with failing(MismatchError, "config.other-settings") as failure:
        continued(transport, other, tmp_path)
    error = failure.value
    assert isinstance(error, MismatchError)
    assert (error.subject, error.run_value, error.worker_value) == ("seed, inner.weight_decay", "0, 0.1", "7, 0.2")
    continued(transport, CONFIG, tmp_path)


def test_a_larger_number_of_steps_extends_the_run(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lasting(steps: int, seed: int = 0) -> RunConfig:
        return replace(CONFIG, seed=seed, inner=replace(CONFIG.inner, steps=steps))

    own, default = CONFIG.inner.steps, RunConfig().inner.steps
    assert default > own + 100
    with failing(MismatchError, "config.other-settings"):
        continued(transport, lasting(9999, seed=1), tmp_path)
    continued(transport, lasting(default), tmp_path)
    assert transport.reader.control() == {}, "the flag was forgotten"
    transport.reader.steer({STEPS: str(own - 1)})
    continued(transport, lasting(default), tmp_path)
    assert transport.reader.control() == {STEPS: str(own - 1)}, "the run was steered to be shorter"
    for steps in (own + 100, own + 100, own):  # longer, the same again, and the run's own settings
        continued(transport, lasting(steps), tmp_path)
        assert transport.reader.control() == {STEPS: str(own + 100)}
    with failing(MismatchError, "config.other-settings"):
        continued(transport, lasting(own + 50), tmp_path)
    monkeypatch.setattr(sys, "argv", ["archipelago", "up", f"--inner.steps={default}"])
    continued(transport, lasting(default), tmp_path)
    assert transport.reader.control() == {STEPS: str(default)}


def test_up_tells_no_password(
    transport: Transport, server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up._greet(transport.reader.manifest(), False, server, server.url, tmp_path)
    said = capsys.readouterr().err
    assert f"archipelago island {tmp_path / 'admin.join'}" in said
    assert server.address.password not in said


def test_flags_give_the_config() -> None:
    for config in (
        RunConfig(),
        RunConfig(seed=3, record=True, model=ModelConfig("small"), inner=InnerConfig("muon", 9, 1e-5)),
        RunConfig(merge=MergeConfig(normalise=False, scores=False), wire=WireConfig(thin="")),
    ):
        assert parse(InitOptions, "archipelago init", flags(config)).settings == config
