"""Machines whose clocks are wrong: what they write and read has the times of the server."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest

from archipelago.broker.messages import Evaluation, Note
from archipelago.broker.redis import reader as redis_reader
from archipelago.broker.redis.transport import connect
from archipelago.ops.watch.reading import Watcher
from tests import samples


@pytest.mark.parametrize("hours", [-7, 5])
def test_times_are_those_of_the_server(hours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = samples.begin(connect(f"fakeredis://{uuid.uuid4().hex}", "sample"))
    epoch = transport.merger.acquire("m", 30.0)
    assert epoch is not None

    def wrong() -> float:
        return time.time() + 3600 * hours

    with monkeypatch.context() as here:
        here.setattr(redis_reader, "time", SimpleNamespace(time=wrong))
        transport.reader.note(Note(wrong(), "merger", "served", "epoch 1 begins"))
        transport.reader.note(Note(wrong(), "a", "joined", "at step 0"))
        transport.reader.record_evaluation(Evaluation(0, 0, 0, wrong(), 5.0, by="a"))
        transport.merger.look(0.0, around=True)
        commit = samples.commit([])
        transport.merger.commit(epoch, replace(commit, tape=replace(commit.tape, unix_seconds=wrong())))
        reading = Watcher(transport, wall=wrong).read()
    known = transport.reader
    times = [note.unix_seconds for note in known.notes(9)] + [entry.unix_seconds for entry in known.tape(9)]
    times += [each.unix_seconds for each in (*known.evaluations(), *reading.view.evaluations)]
    times += [event.unix_seconds for event in reading.events]
    assert len(times) == 2 + 1 + 1 + 1 + 2
    assert all(abs(each - time.time()) < 600 for each in (*times, reading.unix_seconds))
