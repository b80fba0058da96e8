"""The command line: help, one JSON object, and one line for each mistake, which leaves nothing behind."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import BadUrlError, ConfigError, UnknownRunError, UnreachableError
from archipelago.broker.observe.logs import LOGGERS
from archipelago.broker.process import OUTAGE, USER_ERROR, guarded
from archipelago.broker.redis.transport import connect
from archipelago.islands.creation import fitted
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.ops import cli
from archipelago.ops.commands import VERBS, run
from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.launch.init import next_steps
from archipelago.ops.verbs import Group, Verbs
from tests import samples
from tests.failing import failing
from tests.servers import empty_database

ROOT = Path(__file__).parents[2]
SMALL = ["--data.corpus", "small", "--data.shards", "4"]


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    """Return the URL of a database without runs."""
    with empty_database(server, 7) as url:
        yield url


@pytest.fixture
def raw(url: str) -> Iterator[Any]:
    """Return a plain Redis client of that database."""
    with redis.Redis.from_url(url) as client:
        yield client


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
def _restored(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore signals and logging, which verbs set up for their process."""
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(corpora))
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root, packages = logging.getLogger(), [logging.getLogger(name) for name in LOGGERS]
    handlers, levels = list(root.handlers), [logger.level for logger in (root, *packages)]
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)
    root.handlers[:] = handlers
    for logger, level in zip((root, *packages), levels, strict=True):
        logger.setLevel(level)


Answer = tuple[int, str, str]
Call = Callable[..., Answer]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command, and return its exit status, standard output and standard error."""

    def call_verb(*args: str) -> Answer:
        capsys.readouterr()
        try:
            status = guarded(lambda: run(args))
        except SystemExit as left:  # tyro raises it, for --help and for flags that it cannot parse.
            status = int(left.code or 0)
        return (status, *capsys.readouterr())

    return call_verb


def one_line(answer: Answer) -> str:
    """Return the error. Fail if the command printed anything else."""
    status, out, err = answer
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def one_object(answer: Answer) -> dict[str, Any]:
    """Return the JSON object. Fail if the command printed anything else."""
    status, out, _ = answer
    assert status == 0
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return found


# -- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_verbs(call: Call, args: list[str]) -> None:
    status, out, err = call(*args)
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(VERBS)


def test_an_unknown_verb_is_an_error_with_the_list(call: Call) -> None:
    status, out, err = call("trian", "--islands", "3")
    assert (status, out) == (2, "")
    assert "'trian'" in err
    assert all(re.search(f"^  {verb} ", err, re.MULTILINE) for verb in VERBS)


def commands(verbs: Verbs) -> Iterator[list[str]]:
    """Return every command of the command line: the words that select a verb's options."""
    for name, verb in verbs.items():
        inner = importlib.import_module(verb.module).VERBS if isinstance(verb, Group) else {}
        yield from ([name, *words] for words in (commands(inner) if inner else [[]]))


@pytest.mark.parametrize("group", [name for name, verb in VERBS.items() if isinstance(verb, Group)])
def test_a_group_lists_its_verbs(call: Call, group: str) -> None:
    status, out, err = call(group, "--help")
    assert (status, err) == (0, "")
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert [[group, name] for name in listed] == [words for words in commands(VERBS) if words[0] == group]


def test_help_shows_settings_with_the_defaults_of_the_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[sync]\ninterval = 12321\n", encoding="utf-8")
    assert f"(default: {RunConfig().sync.interval})" in call("init", "--help")[1]
    assert "(default: 12321)" in call("init", "--config", "run.toml", "--help")[1]


# -- mistakes -------------------------------------------------------------------------------------------------------


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


NEED_A_RUN = ["status", "island", "merger", "evaluate"]


@pytest.mark.parametrize("verb", [*NEED_A_RUN, "init", "up"])
def test_a_wrong_address(call: Call, verb: str, tmp_path: Path) -> None:
    assert "http://localhost" in one_line(call(verb, "http://localhost", "--run", "x"))
    with failing(BadUrlError):
        run([verb, "http://localhost", "--run", "x"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [*NEED_A_RUN, "init", "up"])
def test_an_address_without_a_server(call: Call, verb: str, tmp_path: Path) -> None:
    address = f"redis://:hidden@127.0.0.1:{unused_port()}"
    at_once = ["--wait-seconds", "0"] if verb in ("island", "merger") else []
    said = one_line(call(verb, address, "--run", "x", *at_once))
    assert "hidden" not in said
    with failing(UnreachableError):
        run([verb, address, "--run", "x", *at_once])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "status"), [("init", OUTAGE), ("island", OUTAGE), ("merger", OUTAGE), ("status", USER_ERROR)]
)
def test_a_launcher_learns_that_another_try_may_succeed(
    monkeypatch: pytest.MonkeyPatch, verb: str, status: int
) -> None:
    at_once = ["--wait-seconds", "0"] if verb in ("island", "merger") else []
    address = f"redis://127.0.0.1:{unused_port()}"
    monkeypatch.setattr(sys, "argv", ["archipelago", verb, address, "--run", "x", *at_once])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert cli.main() == status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("pid", [1, 4711])
def test_the_first_process_of_a_container_ends_on_sigterm_from_the_start(
    monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    handled = set()
    monkeypatch.setattr(signal, "signal", lambda number, _handler: handled.add(number))
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(sys, "argv", ["archipelago", "--version"])
    assert cli.main() == 0
    assert (signal.SIGTERM in handled) == (pid == 1)


@pytest.mark.parametrize("verb", [*NEED_A_RUN, "init"])
def test_no_address(call: Call, verb: str) -> None:
    one_line(call(verb))
    with pytest.raises(ConfigError):
        run([verb])


@pytest.mark.parametrize("verb", NEED_A_RUN)
def test_an_unknown_run(call: Call, verb: str, url: str, raw: Any, tmp_path: Path) -> None:
    create_runs(url, "alpha")
    before = sorted(raw.keys())
    said = one_line(call(verb, url, "--run", "beta"))
    assert "beta" in said
    assert "alpha" in said, "the run that exists"
    with failing(UnknownRunError):
        run([verb, url, "--run", "beta"])
    assert sorted(raw.keys()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", NEED_A_RUN)
def test_no_run_at_all(call: Call, verb: str, url: str, raw: Any) -> None:
    one_line(call(verb, url))
    with pytest.raises(ConfigError):
        run([verb, url])
    assert raw.keys() == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data.corpus", "nope"], "nope"),
        (["--data.corpus", "../small"], "../small"),
        (["--model.size", "huge"], "huge"),
        (["--sync.interval", "0"], "sync.interval"),
        (["--inner.learning-rate", "nan"], "inner.learning_rate"),
        (["--wire.zstd-level", "20"], "wire.zstd_level"),
        (["--run", "a b"], "a b"),
        (["--run", "{x}"], "{x}"),
        (["--config", "none.toml"], "none.toml"),
        (["--config=none.toml"], "none.toml"),
        (["--config"], "--config"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_init_that_fails_leaves_nothing(
    call: Call, url: str, raw: Any, corpora: Path, tmp_path: Path, flags: list[str], named: str
) -> None:
    before = sorted(corpora.rglob("*"))
    assert named in one_line(call("init", url, *SMALL, *flags))
    assert raw.keys() == []
    assert sorted(corpora.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[sync]\nintervall = 3", "sync.intervall"),
        ("speed = 3", "speed"),
        ("[sync]\ninterval = 0", "sync.interval"),
        ("[merge]\nrest = 'mean'", "merge.rest"),
        ("sync", "TOML"),
    ],
)
@pytest.mark.parametrize("verb", ["init", "up"])
def test_a_config_file_that_cannot_be_used(
    call: Call, url: str, raw: Any, tmp_path: Path, verb: str, text: str, named: str
) -> None:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    error = one_line(call(verb, url, "--config", "run.toml"))
    assert "run.toml" in error
    assert named in error
    assert raw.keys() == []
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("up --islands 0", "--islands"),
        ("up --evaluate-every -1", "--evaluate-every"),
        ("up --evaluate-every nan", "--evaluate-every"),
        ("island --evaluate-every nan", "--evaluate-every"),
        ("up --run a/b", "a/b"),
        ("up --sync.window 0", "sync.window"),
        ("island --name a/b", "a/b"),
        ("island --scan-steps -1", "--scan-steps"),
        ("bench parity --islands 0", "--islands"),
        ("bench parity --slow 0.5", "--slow"),
        ("prepare nothing-there", "nothing-there"),
        ("prepare stdlib --name mine", "stdlib"),
        ("prepare stdlib --path somewhere", "--path"),
        ("bench time --scavenged 0", "--scavenged"),
    ],
)
def test_an_error_names_the_mistake(call: Call, tmp_path: Path, command: str, named: str) -> None:
    assert named in one_line(call(*command.split()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        "init --colour red",
        "init --seed many",
        "init --wire.up int2",
        "bench speed",
        "status a b",
    ],
)
def test_flags_that_cannot_be_parsed(call: Call, command: str) -> None:
    status, out, err = call(*command.split())
    assert (status, out) == (2, "")
    assert f"archipelago {command.split()[0]} --help" in err
    assert "Traceback" not in err


def test_a_mistake_in_a_real_process() -> None:
    args = [sys.executable, "-P", "-m", "archipelago.ops", "status", "redis:/localhost"]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    assert "redis:/localhost" in one_line((done.returncode, done.stdout, done.stderr))


# -- init and status --------------------------------------------------------------------------------------------------


def test_init_prints_one_object_and_says_whether_it_created(call: Call, url: str, raw: Any) -> None:
    first = one_object(call("init", url, *SMALL, "--run", "alpha", "--json"))
    config = fitted(checked({"data": {"corpus": "small", "shards": 4}}), open_corpus("small"))
    assert first.pop("parameters") > 10_000
    assert first == {
        "run": "alpha", "created": True, "fragments": config.sync.fragments, "config_digest": config.digest(),
    }  # fmt: skip
    before = sorted(raw.keys())
    again = one_object(call("init", url, *SMALL, "--run", "alpha", "--json"))
    assert (again["created"], again["config_digest"]) == (False, config.digest())
    assert sorted(raw.keys()) == before


def test_init_does_not_repeat_a_password() -> None:
    shown = "\n".join(next_steps("rediss://ada:secret@hub.example:6379?ssl_ca_certs=ca.crt", "alpha"))
    assert "secret" not in shown
    assert "hub.example:6379" in shown


def test_init_in_words_goes_to_standard_error(call: Call, url: str) -> None:
    status, out, err = call("init", url, *SMALL, "--run", "alpha")
    assert (status, out) == (0, "")
    assert "export ARCHIPELAGO_URL=redis://" in err
    assert url not in err  # its password
    assert "archipelago island --run alpha" in err
    assert call("init", url, *SMALL, "--run", "alpha")[2].splitlines()[0] != err.splitlines()[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sync.interval", "48"], "sync.interval is 24 (given: 48)"),
        (["--data.corpus", "other"], "data.corpus is small (given: other)"),
        (["--seed", "3", "--merge.rest", "average"], "seed is 0 (given: 3); merge.rest is isotropic (given: average)"),
    ],
)
def test_init_refuses_a_run_that_exists_with_another_config(
    call: Call, url: str, raw: Any, flags: list[str], said: str
) -> None:
    call("init", url, *SMALL, "--run", "alpha")
    before = {key: raw.dump(key) for key in raw.scan_iter()}
    error = one_line(call("init", url, *SMALL, "--run", "alpha", *flags))
    assert said in error
    assert {key: raw.dump(key) for key in raw.scan_iter()} == before


def test_flags_win_over_the_file_and_the_file_over_the_defaults(call: Call, url: str, raw: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("seed = 5\n[sync]\ninterval = 12\nwindow = 3\n", encoding="utf-8")
    one_object(call("init", url, *SMALL, "--config", "run.toml", "--sync.window", "1", "--json"))
    stored = json.loads(raw.hget("{demo:s0}:manifest", "config"))
    assert (stored["seed"], stored["sync"]["interval"], stored["sync"]["window"]) == (5, 12, 1)
    assert stored["sync"]["fragments"] == RunConfig().sync.fragments


def create_runs(url: str, *names: str) -> None:
    """Create runs without a model, for commands that only read."""
    for name in names:
        transport = connect(url, name)
        manifest = samples.manifest(name)
        transport.create(manifest, samples.first_snapshots(manifest))
        transport.island.heartbeat(samples.heartbeat("a", loss=float("nan")))
        transport.close()


def test_status_prints_one_object(call: Call, url: str) -> None:
    create_runs(url, "alpha")
    found = one_object(call("status", url, "--json"))
    assert (found["run"], found["known"], found["live"], found["rounds"]) == ("alpha", 1, 1, 0)
    assert found["held_out_last"] is None  # JSON has no NaN.
    assert found["islands"][0]["loss"] is None
    assert found["books"]["published"] == 0


def test_status_in_words_goes_to_standard_output(call: Call, url: str) -> None:
    create_runs(url, "alpha")
    status, out, err = call("status", url)
    assert (status, err) == (0, "")
    assert "alpha" in out
    assert "1 known, 1 live, 0 participating" in out


def test_address_and_run_from_the_environment(call: Call, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_runs(url, "alpha", "beta")
    monkeypatch.setenv("ARCHIPELAGO_URL", url)
    monkeypatch.setenv("ARCHIPELAGO_RUN", "beta")
    assert one_object(call("status", "--json"))["run"] == "beta"
    assert one_object(call("status", "--run", "alpha", "--json"))["run"] == "alpha"
    monkeypatch.setenv("ARCHIPELAGO_URL", "redis://127.0.0.1:1")
    assert one_object(call("status", url, "--json"))["run"] == "beta"


@pytest.mark.parametrize("verb", NEED_A_RUN)
def test_the_only_run_needs_no_name_and_two_runs_are_listed(call: Call, url: str, verb: str) -> None:
    create_runs(url, "alpha")
    assert one_object(call("status", url, "--json"))["run"] == "alpha"
    create_runs(url, "beta")
    assert {"alpha", "beta"} <= set(re.findall(r"\w+", one_line(call(verb, url))))
