"""Mistakes that new users make, one command line each: each ends with one clear error and leaves nothing behind."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.preparation import prepare_text
from archipelago.ops.commands import run
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import samples
from tests.harness.processes import Processes

NEW = "--data.corpus small --data.shards 4"
#: Command lines and the codes of their errors. RUNS is the URL of a Redis with one run, alpha. NONE has no run. AWAY
#: does not answer. TAKEN is a port in use. NEW stands for flags with which `init` creates a run.
MISTAKES = [
    # the address of the Redis
    ("status", "config.which-run"),
    ("status localhost:6379", "invitation.file"),
    ("status http://localhost", "broker.bad-url"),
    ("up http://localhost NEW --run x", "broker.bad-url"),
    ("status AWAY", "broker.unreachable"),
    ("status WRONG_PASSWORD", "broker.access"),
    ("status RUNS99", "broker.refused-command"),
    ("status missing.join", "invitation.file"),
    ("status open.join", "invitation.file"),
    ("status damaged.join", "invitation.invalid"),
    # the name of the run
    ("status NONE", "config.which-run"),
    ("status RUNS --run beta", "broker.unknown-run"),
    ("merger RUNS --run beta --wait-seconds 0", "broker.unknown-run"),
    ("invite oslo RUNS --run beta", "broker.unknown-run"),
    ("runs AWAY", "broker.unreachable"),
    ("rm a/b RUNS", "config.name"),
    ("rm beta RUNS", "broker.unknown-run"),
    ("up --run ../x", "config.name"),
    # settings
    ("init RUNS NEW --run alpha", "config.other-settings"),
    ("init NONE NEW --model.size huge", "model.unknown"),
    ("init NONE NEW --model.vocabulary 100", "config.value"),
    ("init NONE NEW --sync.fragments 99999", "config.value"),
    ("init NONE NEW --inner.learning-rate nan", "config.value"),
    ("init NONE --data.corpus ../small", "config.name"),
    ("init NONE --config none.toml", "config.file"),
    ("init NONE --config bad.toml", "config.file"),
    ("init NONE --config unknown.toml", "config.unknown-key"),
    ("init NONE --config", "config.value"),
    # text and weights
    ("init NONE --data.corpus nope", "data.missing"),
    ("init NONE --data.corpus small --data.shards 16384", "data.too-small"),
    ("init NONE NEW --data.sequence-length 100000", "data.too-small"),
    ("init NONE NEW --from nothing", "weights.missing"),
    ("init NONE NEW --from nonsense.safetensors", "weights.damaged"),
    ("prepare missing", "data.no-source"),
    ("prepare empty", "data.too-small"),
    ("prepare text --name 'a b'", "config.name"),
    ("prepare text --name stdlib", "data.taken"),
    ("prepare text --tokenizer bpe:5", "tokenizer.bad-name"),
    ("prepare text --name other --tokenizer empty.json", "tokenizer.damaged"),
    ("prepare stdlib --name mine", "config.value"),
    # workers
    ("island AWAY --run x --wait-seconds 0", "broker.unreachable"),
    ("island RUNS --name a/b", "config.name"),
    ("island RUNS --wait-seconds=-1", "config.value"),
    ("island RUNS --probe-port TAKEN", "config.value"),
    ("island RUNS --evaluate-every nan", "config.value"),
    ("merger RUNS --lease-seconds inf", "config.value"),
    ("merger RUNS --keep 0", "config.value"),
    ("merger NONE --run lost --resume --wait-seconds 0", "broker.unknown-run"),
    # everything at once
    ("up NEW --islands 0", "config.value"),
    ("up NEW --standbys 65", "config.value"),
    ("up NEW --folder s3://bucket/runs", "file.url"),
    ("up NEW --folder text", "file.no-folder"),
    ("up NEW --bucket s4://bucket/runs", "bucket.scheme"),
    ("up NEW --from missing", "weights.missing"),
    ("up NEW AWAY", "broker.unreachable"),
    ("up NEW NONE --open", "config.value"),
    ("up NEW --open --host 'no host'", "config.value"),
    ("chaos --islands 0", "config.value"),
    ("chaos --standbys 65", "config.value"),
    ("up NEW --mesh rows=2", "config.value"),
    ("up NEW --host hub", "config.value"),
    ("bench parity --islands 0", "config.value"),
    ("bench parity --slow 0.5", "config.value"),
    ("bench largest --fragments 0", "config.value"),
    ("bench accelerator --model.size huge", "model.unknown"),
    ("simulate tables --days=-1", "config.value"),
    ("simulate tables --seed=-1", "config.value"),
    ("bench study nothing", "study.shape"),
    # watching and steering
    ("dash RUNS --port TAKEN", "config.value"),
    ("dash RUNS --host 192.0.2.1 --port 0", "config.value"),
    ("dash RUNS --run beta --wait-seconds 0", "broker.unknown-run"),
    ("dash RUNS --port 70000", "config.value"),
    ("dash RUNS --wait-seconds nan", "config.value"),
    ("doctor RUNS --seconds nan", "config.value"),
    ("steer outer.learning_rate=1", "config.which-run"),
    ("steer RUNS outer.learning_rat=1", "control.value"),
    ("steer RUNS island.oslo=fly", "control.value"),
    ("steer RUNS merging", "steer.no-change"),
    ("steer RUNS merging=paused sync.quorum=0", "control.value"),
    ("steer RUNS sync.quorum=2 sync.quorum=3", "steer.no-change"),
    ("steer RUNS rubbish=", "control.value"),
    ("report empty", "checkpoint.missing"),
    ("report nothing", "checkpoint.missing"),
    # the model
    ("export nothing --out new", "checkpoint.missing"),
    ("export RUNS --out full", "export.exists"),
    ("export RUNS --out s4://bucket/out", "file.url"),
    ("generate nothing", "checkpoint.missing"),
    ("generate nonsense.safetensors", "checkpoint.missing"),
    ("generate RUNS --temperature=-1", "config.value"),
    ("generate RUNS --tokens 0", "config.value"),
    ("generate http://x --run mine", "broker.bad-url"),
    ("replay nothing", "record.missing"),
    # members
    ("invite oslo", "invitation.no-admin"),
    ("invite 'a b' RUNS --run alpha", "config.name"),
    ("revoke", "config.value"),
    ("revoke nobody RUNS --run alpha", "invitation.no-member"),
]
#: Command lines that cannot be parsed, and verbs that do not exist.
UNPARSABLE = [
    "trian",
    "rm",
    "bench speed",
    "simulate nothing",
    "init --colour red",
    "init --seed many",
    "init --wire.up int3",
    "up --islands three",
    "export nothing",
    "export RUNS --out new --dtype int8",
    "invite oslo RUNS --role king",
    "chaos --kinds kil",
    "status a b",
]


@dataclass(frozen=True)
class Place:
    """A folder with files that users name by mistake, and the words that stand for addresses in command lines."""

    folder: Path
    words: dict[str, str]

    def args(self, line: str) -> list[str]:
        """Return the arguments of a command line."""
        for word, value in self.words.items():
            line = line.replace(word, value)
        return shlex.split(line)


@pytest.fixture(scope="module")
def place(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Make the folder, a run, and a port that is taken."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("empty", "full", "data"):
        (folder / name).mkdir()
    for name, content in {
        "full/file": b"", "text": b"What is the text about? Nothing, line by line.\n" * 2000,
        "nonsense.safetensors": b"nonsense", "empty.json": b"{}", "bad.toml": b"sync",
        "unknown.toml": b"[sync]\nintervall = 3\n", "open.join": b"{}", "damaged.join": b"{",
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
    (folder / "open.join").chmod(0o644)
    (folder / "damaged.join").chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder / "data"))
        prepare_text(folder / "text", "small")
    runs, none = (server.url.removesuffix("/0") + f"/{number}" for number in (9, 10))
    address = server.url.rpartition("@")[2].partition("/")[0]
    transport = samples.begin(connect(runs, "alpha"))
    # A port that is bound, but at which nothing listens, refuses connections, and no other process gets it meanwhile.
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as away:
        away.bind(("127.0.0.1", 0))
        yield Place(folder, {
            "RUNS": runs, "NONE": none, "TAKEN": str(taken.getsockname()[1]), "NEW": NEW,
            "AWAY": f"redis://:hidden@127.0.0.1:{away.getsockname()[1]}", "WRONG_PASSWORD": f"redis://:hidden@{address}",
        })  # fmt: skip
    transport.connection.redis.flushdb()
    transport.close()


@pytest.fixture(autouse=True)
def _in_the_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(place.folder / "data"))


def traces(place: Place) -> tuple[list[Path], list[Any]]:
    """Return all files, and all keys of both databases."""
    keys: list[Any] = []
    for word in ("RUNS", "NONE"):
        with redis.Redis.from_url(place.words[word]) as client:
            keys += sorted(client.keys())
    return sorted(place.folder.rglob("*")), keys


def test_a_mistake_ends_with_one_error_and_leaves_nothing_behind(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    before = traces(place)
    for line, code in MISTAKES:
        with pytest.raises(ArchipelagoError) as caught:
            run(place.args(line))
        error, printed = caught.value, capsys.readouterr()
        assert error.code == code, line
        assert error.remedy, line
        assert printed.out == "", line
        for text in (str(error), printed.err):
            assert "hidden" not in text, line
            assert "Traceback" not in text, line
        assert "\n" not in str(error), line
        assert traces(place) == before, line


def test_a_command_that_cannot_be_parsed_says_where_help_is(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = traces(place)
    for line in UNPARSABLE:
        try:
            status: object = run(place.args(line))
        except SystemExit as left:
            status = left.code
        printed = capsys.readouterr()
        assert (status, printed.out) == (2, ""), line
        assert "--help" in printed.err, line
        assert "Traceback" not in printed.err, line
    assert traces(place) == before


@pytest.mark.full
@pytest.mark.processes
def test_a_real_process_ends_without_a_traceback(place: Place, tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    for line in ("trian", "status AWAY", "island RUNS --probe-port TAKEN"):
        process = processes.start(*place.args(line))
        said = processes.ended(process, status=2) + processes.said(process)
        assert "hidden" not in said, line
        assert line == "trian" or (said.startswith("error: ") and said.count("\n") == 1), line
    processes.end()
