"""`docs/guide/redis-cli.md`: every command on the page is run, and answers with the fields that the page shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.messages import Evaluation, Note, Refusal, Resume
from archipelago.broker.ranges import ReadPosition
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import samples
from tests.servers import empty_database

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
def url(server: RedisServer) -> Iterator[str]:
    """Return the URL of a database with one run that has every kind of record."""
    with empty_database(server, 9) as mine:
        fill(mine)
        yield mine


def fill(url: str) -> None:
    """Write to Redis as islands, a merger and an operator do."""
    transport = samples.begin(connect(url, RUN))
    transport.island.heartbeat(samples.heartbeat("island-0", data="23:0:1051", last_refusal="too old"))
    assert isinstance(transport.island.lease_range(["23"], "island-0/x"), ReadPosition)
    for sequence in range(3):
        transport.island.publish(samples.contribution(sequence=sequence, island="island-0"), b"payload")
    epoch = transport.merger.acquire("00b81fc22d7c", 3600.0)  # longer than all tests of this page
    assert epoch is not None
    transport.merger.announce(epoch, Resume(0, epoch))
    merged, refused, _ = transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([merged.entry], cursors={"0": (0, 42)}))
    samples.refuse(transport, epoch, [(refused.entry, Refusal("island-0", "x", 1, 1, 0, 100, "it was too old"))])
    transport.reader.record_evaluation(Evaluation(1, 4, 100, 1.7e9, 5.0, "island-0"))
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


def test_each_command_is_answered_with_what_the_page_shows(url: str) -> None:
    assert len(re.findall(r"^## .*\?$", PAGE, re.MULTILINE)) >= 10
    assert (len(READING) > 20, len(REMOVING)) == (True, 2)
    names = set[str]()
    for command in READING:
        with redis.Redis.from_url(url) as client:
            answer = client.execute_command(*words_of(command))
        texts = flat(answer)
        assert answer is not None and texts, command
        # A nil answer shows that a key or a field has another name.
        assert "None" not in texts, command
        shown, there = fields(command, ALL[command]), set(texts)
        if "json.tool" in command:
            there = set(re.findall(r'"(\w+)":', texts[0]))
        assert shown <= there, command
        names |= shown
        if words_of(command)[0] == "HMGET":
            assert len(texts) == len(ALL[command].splitlines()), command
    assert {"reason", "members", "loss", "bits_per_byte", "used_memory_human", "epoch", "text"} <= names
    assert {"outer.learning_rate", "interval"} <= names


def test_the_remove_command_deletes_all_keys_of_the_run(server: RedisServer) -> None:
    with empty_database(server, 10) as mine, redis.Redis.from_url(mine) as client:
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
