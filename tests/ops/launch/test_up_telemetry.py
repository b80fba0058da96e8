"""`up` hands on what was asked for: each worker its flags, and a port of its own; and says no before it starts any."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.memory import MemoryBroker
from archipelago.ops.launch.supervisor import Child
from archipelago.ops.launch.up import Session, UpOptions, main
from tests import samples


def argv(options: UpOptions) -> dict[str, list[str]]:
    """What each worker is started with."""
    manifest = samples.manifest()
    transport = MemoryBroker().connect(manifest.run)
    session = Session(options, manifest, transport, "redis://h", Path("runs/demo"), lambda: False, None)  # type: ignore[arg-type]
    return {child.name: list(child.argv) for child in (session.merger, session.evaluator, *session.islands)}


def test_nothing_is_asked_of_the_workers_by_default() -> None:
    for given in argv(UpOptions()).values():
        assert not {"--metrics-port", "--no-tensorboard", "--wandb", "--log-json"} & set(given)


def test_each_worker_has_a_port_of_its_own_and_the_same_flags() -> None:
    found = argv(UpOptions(islands=2, metrics_port=9310, wandb=True, log_json=True, tensorboard=False))
    for given in found.values():
        assert {"--no-tensorboard", "--wandb", "--log-json"} <= set(given)
    ports = {name: given[given.index("--metrics-port") + 1] for name, given in found.items() if name != "evaluate"}
    assert ports == {"merger": "9310", "island-0": "9311", "island-1": "9312"}
    assert "--metrics-port" not in found["evaluate"]


def test_ports_must_be_there_for_all() -> None:
    with pytest.raises(ConfigError, match=r"--metrics-port cannot be 65534\. Choose 0 to 65532"):
        main(UpOptions(islands=3, metrics_port=65534))
    assert not Path("runs").exists()


def test_a_missing_package_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="archipelago-train"):
        main(UpOptions(wandb=True))
    assert not Path("runs").exists()


@pytest.mark.parametrize("line", ["error: no such run", '{"level": "error", "message": "no such run"}'])
def test_the_last_words_of_a_worker_are_words(line: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"before\n{line}\n")
    assert Child("merger", [], {}, log).last_words().removeprefix("error: ") == "no such run"
