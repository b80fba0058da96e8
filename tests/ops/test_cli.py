"""The command line: help, one JSON object, and one line for each mistake, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.process import OUTAGE, USER_ERROR
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.tasks.ours import fitted
from archipelago.ops import cli
from archipelago.ops.commands import VERBS, VerbGroup, Verbs
from tests import samples

SMALL = ["--data.corpus", "small", "--data.shards", "4"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `small` and `other`, two corpora of nearly the smallest size."""
    folder, source = tmp_path_factory.mktemp("corpora"), tmp_path_factory.mktemp("source") / "text"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder))
        for name in ("small", "other"):
            source.write_text(f"What is the {name} text about? Nothing, line by line.\n" * 2000, encoding="utf-8")
            prepare_text(source, name)
    return folder


@pytest.fixture(autouse=True)
def _corpora(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(corpora))


class Answer(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


Call = Callable[..., Answer]


@pytest.fixture
def call(call: Callable[..., tuple[int, str, str]]) -> Call:
    """Run a command in this process."""
    return lambda *args: Answer(*call(*args))


def one_line(answer: Answer) -> str:
    """Return the error. Fail if the command printed anything else."""
    assert (answer.status, answer.out) == (2, ""), answer
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1 and answer.err.endswith("\n")
    return answer.err


def one_object(answer: Answer) -> dict[str, Any]:
    """Return the JSON object. Fail if the command printed anything else."""
    assert answer.status == 0, answer
    assert answer.out.count("\n") == 1
    found: dict[str, Any] = json.loads(answer.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return found


# -- help -----------------------------------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    """Return the verbs that a help text lists."""
    return [line.split()[0] for line in text.splitlines() if line.startswith("  ")]


def test_help_lists_the_verbs_of_the_command_line_and_of_each_group(call: Call) -> None:
    for args in ([], ["--help"], ["-h"], ["help"]):
        answer = call(*args)
        assert (answer.status, answer.err, listed(answer.out)) == (0, "", list(VERBS)), args
    for group in (name for name, verb in VERBS.items() if isinstance(verb, VerbGroup)):
        answer = call(group, "--help")
        assert (answer.status, answer.err) == (0, "")
        assert [[group, name] for name in listed(answer.out)] == [w for w in commands(VERBS) if w[0] == group]
    assert call("help", "status").out == call("status", "--help").out
    for args, meant in ((["statsu"], "status"), (["--verison"], "--version"), (["bench", "stduy"], "bench study")):
        wrong = call(*args)
        assert (wrong.status, wrong.out, wrong.err.count("\n")) == (2, "", 1)
        assert f"Did you mean `archipelago {meant}`?" in wrong.err
    unknown = call("trian", "--islands", "3")
    assert (unknown.status, unknown.out, set(VERBS) <= set(listed(unknown.err))) == (2, "", True)
    assert "'trian'" in unknown.err


def commands(verbs: Verbs) -> Iterator[list[str]]:
    """Return every command of the command line: the words that select a verb's options."""
    for name, verb in verbs.items():
        inner = verb.verbs if isinstance(verb, VerbGroup) else {}
        yield from ([name, *words] for words in (commands(inner) if inner else [[]]))


def test_help_shows_settings_with_the_defaults_of_the_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[sync]\ninterval = 12321\n", encoding="utf-8")
    assert f"(default: {RunConfig().sync.interval})" in call("init", "--help").out
    assert "(default: 12321)" in call("init", "--config", "run.toml", "--help").out


# -- addresses and runs ----------------------------------------------------------------------------------------------


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


NEED_A_RUN = ["status", "island", "merger"]
AT_ONCE = {"island": ["--wait-seconds", "0"], "merger": ["--wait-seconds", "0"]}


def test_a_launcher_learns_that_another_try_may_succeed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"redis://:secret@127.0.0.1:{unused_port()}"
    for verb, status in (("init", OUTAGE), ("island", OUTAGE), ("merger", OUTAGE), ("status", USER_ERROR)):
        monkeypatch.setattr(sys, "argv", ["archipelago", verb, address, "--run", "x", *AT_ONCE.get(verb, [])])
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert cli.main() == status, verb
        assert re.match("warning: `ps` shows the password(?!.*secret)", capsys.readouterr().err, re.DOTALL)


def test_the_first_process_of_a_container_ends_on_sigterm_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["archipelago", "--version"])
    for pid in (1, 4711):
        handled = set[int]()
        monkeypatch.setattr(signal, "signal", lambda number, how, to=handled: how is cli._end and to.add(number))
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        assert cli.main() == 0
        assert (signal.SIGTERM in handled) == (pid == 1)


def test_the_only_run_needs_no_name_and_two_runs_are_listed(call: Call, url: str) -> None:
    create_runs(url, "alpha")
    assert one_object(call("status", url, "--json"))["run"] == "alpha"
    create_runs(url, "beta")
    for verb in NEED_A_RUN:
        assert {"alpha", "beta"} <= set(re.findall(r"\w+", one_line(call(verb, url)))), verb


# -- init and status --------------------------------------------------------------------------------------------------


def test_init_creates_a_run_once_and_refuses_other_settings(call: Call, url: str, raw: Any) -> None:
    alpha = ["init", url, *SMALL, "--run", "alpha"]
    first = one_object(call(*alpha, "--json"))
    config = fitted(checked({"data": {"corpus": "small", "shards": 4}}), open_corpus("small"))
    assert first.pop("parameters") > 10_000
    assert first == {
        "run": "alpha", "created": True, "fragments": config.sync.fragments, "config_digest": config.digest(),
    }  # fmt: skip
    before = {key: raw.dump(key) for key in raw.scan_iter()}
    again = one_object(call(*alpha, "--json"))
    assert (again["created"], again["config_digest"]) == (False, config.digest())
    said = "seed is 0 (given: 3); data.corpus is small (given: other); sync.interval is 24 (given: 48)"
    assert said in one_line(call(*alpha, "--seed", "3", "--data.corpus", "other", "--sync.interval", "48"))
    assert {key: raw.dump(key) for key in raw.scan_iter()} == before


def test_init_in_words_goes_to_standard_error(call: Call, url: str) -> None:
    created, found = (call("init", url, *SMALL, "--run", "alpha") for _ in range(2))
    assert (created.status, created.out) == (0, "")
    assert "export ARCHIPELAGO_URL=redis://" in created.err
    assert url not in created.err  # its password
    assert "archipelago island --run alpha" in created.err
    assert found.err.splitlines()[0] != created.err.splitlines()[0]


def test_flags_win_over_the_file_and_the_file_over_the_defaults(call: Call, url: str, raw: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("seed = 5\n[sync]\ninterval = 12\nwindow = 3\n", encoding="utf-8")
    one_object(call("init", url, *SMALL, "--config", "run.toml", "--sync.window", "1", "--json"))
    stored = json.loads(raw.hget("{demo:s0}:manifest", "config"))
    assert (stored["seed"], stored["sync"]["interval"], stored["sync"]["window"]) == (5, 12, 1)
    assert stored["sync"]["fragments"] == RunConfig().sync.fragments


def create_runs(url: str, *names: str) -> None:
    """Create runs without a model, for commands that only read."""
    for name in names:
        transport = samples.begin(connect(url, name))
        transport.island.heartbeat(samples.heartbeat("a", loss=float("nan")))
        transport.close()


def test_address_and_run_from_the_environment(call: Call, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_runs(url, "alpha", "beta")
    monkeypatch.setenv("ARCHIPELAGO_URL", url)
    monkeypatch.setenv("ARCHIPELAGO_RUN", "beta")
    assert one_object(call("status", "--json"))["run"] == "beta"
    assert one_object(call("status", "--run", "alpha", "--json"))["run"] == "alpha"
    monkeypatch.setenv("ARCHIPELAGO_URL", "redis://127.0.0.1:1")
    assert one_object(call("status", url, "--json"))["run"] == "beta"
