"""`docs/guide/redis-cli.md`: every command on the page is run, and answers with the fields that the page shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.corpus_shards import Place
from archipelago.broker.messages import Evaluation, Note, Refusal, Resume
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import Server
from tests import samples

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "redis-cli.md").read_text(encoding="utf-8")
RUN = "demo"
REMOVAL = ("UNLINK", "SREM")


def commands() -> dict[str, str]:
    """Return the commands on the page, each with the answer that the page shows."""
    out: dict[str, str] = {}
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            out[command] = shown
    return out


ALL = commands()
READING = [command for command in ALL if not any(word in command for word in REMOVAL)]
REMOVING = [command for command in ALL if command not in READING]


def fields(command: str, shown: str) -> set[str]:
    """Return the names in an answer as redis-cli shows it, for commands whose answer has names."""
    quoted = re.findall(r'"((?:[^"\\]|\\.)*)"', shown)
    if "json.tool" in command:
        return set(re.findall(r'"(\w+)":', shown))
    if "XINFO" in command:
        return {name for name in quoted if re.fullmatch(r"[a-z-]+", name)} - {"merger"}
    if "INFO" in command:
        return set(re.findall(r"^(\w+):", shown, re.MULTILINE))
    if "XREVRANGE" in command:
        entries = re.split(r'^.*"\d+-\d+"\n', shown, flags=re.MULTILINE)
        return {name for entry in entries for name in re.findall(r'"((?:[^"\\]|\\.)*)"', entry)[0::2]}
    return set(quoted[0::2]) if "HGETALL" in command and "control" in command else set()


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    """Return the URL of a database with one run that has every kind of record."""
    mine = server.url.removesuffix("/0") + "/9"
    with redis.Redis.from_url(mine) as client:
        client.flushdb()
        fill(mine)
        yield mine
        client.flushdb()


def fill(url: str) -> None:
    """Write to Redis as islands, a merger and an operator do."""
    transport = connect(url, RUN)
    manifest = samples.manifest(RUN)
    transport.create(manifest, samples.first_snapshots(manifest))
    transport.island.heartbeat(samples.heartbeat("island-0", data="23:0:1051", last_refusal="too old"))
    assert isinstance(transport.island.lease_shard(["23"], "island-0/x"), Place)
    for sequence in range(3):
        transport.island.publish(samples.contribution(sequence=sequence, island="island-0"), b"payload")
    epoch = transport.merger.acquire("00b81fc22d7c", 3600.0)  # longer than all tests of this page
    assert epoch is not None
    transport.merger.announce(epoch, Resume(0, epoch))
    merged, refused, _ = transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([merged.entry], cursors={"0": (0, 42)}))
    transport.merger.refuse(epoch, [(refused.entry, Refusal("island-0", "x", 1, 1, 0, 100, "it was too old"))])
    transport.reader.record_evaluation(Evaluation(1, 4, 100, 1.7e9, 5.0))
    transport.reader.steer({"outer.learning_rate": "0.6", "island.island-2": "drain"})
    transport.reader.note(Note(1.7e9, "merger", "steered", "outer.learning_rate=0.6 from round 2 on"))
    transport.close()


def flat(answer: Any) -> list[str]:
    """Return all texts in an answer of the client library."""
    if isinstance(answer, Mapping):
        return [text for pair in answer.items() for part in pair for text in flat(part)]
    if isinstance(answer, list | tuple | set):
        return [text for part in answer for text in flat(part)]
    return [answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)]


def words_of(command: str) -> list[str]:
    """Return the Redis command in a line of the page, without the client's options and without pipes."""
    program, *words = shlex.split(command.partition(" | ")[0])
    assert program == "redis-cli"
    return [word for word in words if word != "--no-raw"]


def test_the_page_answers_ten_questions_and_more() -> None:
    assert len(re.findall(r"^## .*\?$", PAGE, re.MULTILINE)) >= 10
    assert len(READING) > 20
    assert len(REMOVING) == 2


@pytest.mark.parametrize("command", READING)
def test_each_command_is_answered_with_what_the_page_shows(command: str, url: str) -> None:
    with redis.Redis.from_url(url) as client:
        answer = client.execute_command(*words_of(command))
    texts = flat(answer)
    assert answer is not None
    assert "None" not in texts or "XINFO" in command  # A nil answer shows that a key or a field has another name.
    assert texts
    shown, there = fields(command, ALL[command]), set(texts)
    if "json.tool" in command:
        there = set(re.findall(r'"(\w+)":', texts[0]))
    assert shown <= there
    if words_of(command)[0] == "HMGET":
        assert len(texts) == len(ALL[command].splitlines())


def test_names_are_found_on_the_page() -> None:
    """The test above would pass if it found no names on the page, so check that it finds them."""
    names = {command: fields(command, shown) for command, shown in ALL.items()}
    seen = set().union(*names.values())
    assert {"reason", "members", "loss", "bits_per_byte", "lag", "used_memory_human", "epoch", "text"} <= seen
    assert {"outer.learning_rate", "interval"} <= seen


@pytest.fixture
def shell(url: str, tmp_path: Path) -> dict[str, str]:
    """Return an environment in which `redis-cli` connects to that server."""
    found = shutil.which("redis-cli")
    if found is None:
        pytest.skip("redis-cli is not installed")
    named = url.replace("://:", "://default:", 1)
    shim = tmp_path / "bin" / "redis-cli"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {found} --no-auth-warning $SHOWN -u "{named}" "$@"\n', encoding="utf-8")
    shim.chmod(0o755)
    return {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("command", READING)
def test_each_line_of_the_page_works_in_a_shell(command: str, shell: dict[str, str]) -> None:
    # redis-cli formats its output for a terminal, but not for a pipe.
    environment = {**shell, "SHOWN": "" if " | " in command else "--no-raw"}
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert (done.stderr, bool(done.stdout)) == ("", True)
    assert not re.search(r"\bERR\b|WRONGTYPE|\(nil\)", done.stdout.replace('"lag"\n   12) (nil)', ""))
    assert fields(command, ALL[command]) <= fields(command, done.stdout)


def test_the_remove_command_deletes_all_keys_of_the_run(server: Server) -> None:
    mine = server.url.removesuffix("/0") + "/10"
    with redis.Redis.from_url(mine) as client:
        client.flushdb()
        fill(mine)
        client.set("demolition:manifest", "another's")
        for command in REMOVING:
            words = words_of(command)
            if words[0] == "--scan":
                assert words[1] == "--pattern"
                assert command.endswith(" | xargs redis-cli UNLINK")
                assert client.unlink(*client.scan_iter(words[2])) > 0
            else:
                assert client.execute_command(*words) == 1
        assert client.smembers(REGISTRY) == set()
        assert client.keys() == [b"demolition:manifest"]
        client.flushdb()
