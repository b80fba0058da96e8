"""`up` passes options on to its workers, each with a separate port, and refuses wrong options before it starts any."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.ops.launch.session import Session
from archipelago.ops.launch.supervisor import Child
from archipelago.ops.launch.up import UpOptions, main
from tests import samples
from tests.failing import failing


def argv(options: UpOptions) -> dict[str, list[str]]:
    """Return the arguments of each worker."""
    manifest = samples.manifest()
    transport = MemoryBroker().connect(manifest.run)
    own = options.session(has_losses=True)
    session = Session(own, manifest, transport, "redis://h", Path("runs/demo"), lambda: False, None)
    return {child.name: list(child.argv) for child in (session.merger, *session.islands)}


def test_workers_get_no_flags_by_default() -> None:
    for given in argv(UpOptions()).values():
        assert not {"--metrics-port", "--no-tensorboard", "--wandb", "--log-json"} & set(given)


def test_the_merger_gets_its_threads() -> None:
    found = argv(UpOptions(merger_threads=3))
    assert found["merger"][found["merger"].index("--threads") + 1] == "3"
    assert not any("--threads" in given for name, given in found.items() if name != "merger")
    assert "--threads" not in argv(UpOptions())["merger"]
    with failing(ConfigError, "config.threads"):
        main(UpOptions(merger_threads=-1))


def test_each_worker_gets_the_same_flags_and_a_separate_port() -> None:
    found = argv(UpOptions(islands=2, metrics_port=9310, wandb=True, log_json=True, tensorboard=False))
    for given in found.values():
        assert {"--no-tensorboard", "--wandb", "--log-json"} <= set(given)
    ports = {name: given[given.index("--metrics-port") + 1] for name, given in found.items()}
    assert ports == {"merger": "9310", "island-0": "9311", "island-1": "9312"}


def test_there_must_be_a_port_for_each_worker() -> None:
    with failing(ConfigError, "config.metrics-port"):
        main(UpOptions(islands=3, metrics_port=65534))
    assert not Path("runs").exists()


def test_a_missing_package_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with failing(ConfigError, "config.extra"):
        main(UpOptions(wandb=True))
    assert not Path("runs").exists()


@pytest.mark.parametrize("line", ["error: no such run", '{"level": "error", "message": "no such run"}'])
def test_the_last_message_of_a_worker_is_read_from_either_form_of_log(line: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"before\n{line}\n")
    assert Child("merger", [], {}, log).last_words().removeprefix("error: ") == "no such run"
