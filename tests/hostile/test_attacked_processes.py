"""The attacks on real processes: a merger, and islands that train on real text, with all commands of an operator."""

from __future__ import annotations

import math
import random
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import redis

from archipelago.broker.messages import TapeEntry
from archipelago.ops.launch.embedded_redis import Server
from tests.conftest import Until
from tests.hostile.attacker import Attacker, as_island
from tests.hostile.attacks import ATTACKS, OWN, make, own_stream
from tests.hostile.process_run import ProcessRun, assert_unharmed, standing

#: By this step, a run without attacks has a training loss below 2.6 nats a byte; it begins above 5.
LEARNT_STEPS, LEARNT_LOSS = 400, 2.9
#: Attacks that are made together, before the run must go on.
TOGETHER = 18

pytestmark = [pytest.mark.full, pytest.mark.processes]


@pytest.fixture(scope="module")
def process_run(
    server: Server, tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path, until: Until
) -> Iterator[ProcessRun]:
    """Return a run that all attacks of this module attack, one after the other."""
    started = ProcessRun(
        server.url, f"hostile-{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("hostile"), corpus_folder
    )
    started.await_training(until)
    yield started
    started.end()


def attacker_of(run: ProcessRun, client: redis.Redis, name: str) -> Attacker:
    return Attacker(client, run.transport.reader.manifest(), name, victim=run.islands[0])


def test_no_attack_stops_a_process(process_run: ProcessRun, until: Until) -> None:
    """Some attacks at a time, under new names. The run goes on, and with another merger too."""
    dice = random.Random(1)
    attacks = [*dice.sample(ATTACKS, len(ATTACKS)), own_stream]
    with redis.Redis.from_url(process_run.url) as client:
        for number in range(0, len(attacks), TOGETHER):
            before = standing(process_run)
            for attack in attacks[number : number + TOGETHER]:
                make(attack, attacker_of(process_run, client, f"mallory-{number}"), dice)
            before = assert_unharmed(process_run, before, until)
            process_run.stop_merger()
            process_run.begin_merger()
            assert_unharmed(process_run, before, until)
    assert process_run.status() == 0


def test_what_the_server_permits_to_an_island_harms_nobody(process_run: ProcessRun, until: Until) -> None:
    before, dice = standing(process_run), random.Random(2)
    with redis.Redis.from_url(process_run.url) as administrator:
        url = as_island(process_run.url, process_run.run, "sybil", administrator)
    with redis.Redis.from_url(url) as client:
        attacker = attacker_of(process_run, client, "sybil")
        attacker.send()  # these are permitted
        attacker.beat()
        for attack in OWN:
            make(attack, attacker, dice)
    assert_unharmed(process_run, before, until)


def test_an_island_with_another_text_of_the_same_size_does_not_start(
    process_run: ProcessRun, corpus_folder: Path, tmp_path: Path, until: Until
) -> None:
    """12. The corpus has the right size and another byte."""
    corpora = tmp_path / "corpora"
    shutil.copytree(corpus_folder, corpora)
    largest = max((path for path in corpora.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.chmod(0o644)
    text = bytearray(largest.read_bytes())
    text[len(text) // 3] ^= 1
    largest.write_bytes(bytes(text))
    process_run.environment |= {"ARCHIPELAGO_DATA": str(corpora)}
    try:
        island = process_run.start_island("forger")
        assert island.wait() == 2, process_run.processes.said(island)
        doctor = process_run.processes.start(
            "doctor", process_run.url, "--run", process_run.run, "--json", **process_run.environment
        )
        out, _ = doctor.communicate()
        assert doctor.returncode == 1, out
    finally:
        process_run.environment |= {"ARCHIPELAGO_DATA": str(corpus_folder)}
    process_run.assert_running()


def test_the_newer_of_two_islands_with_one_name_stays(process_run: ProcessRun, until: Until) -> None:
    """14. The older one leaves with a sentence, and no token is merged twice."""
    older = process_run.members[0]
    before = replace(standing(process_run), fastest=process_run.slowest())  # the newer one counts its steps from zero
    process_run.members[0] = process_run.start_island(process_run.islands[0])
    until(lambda: older.poll() is not None, "the older one to leave")
    assert "Traceback" not in process_run.processes.said(older)
    assert_unharmed(process_run, before, until)


def test_a_newcomer_joins_after_all_attacks(process_run: ProcessRun, until: Until) -> None:
    """It meets what the attacks have left: requests, answers, names, notes, and claims of checkpoints."""
    process_run.members.append(process_run.start_island("newcomer"))
    process_run.islands = (*process_run.islands, "newcomer")
    process_run.await_training(until)
    assert_unharmed(process_run, standing(process_run), until)


def test_the_loss_is_as_without_the_attacks(process_run: ProcessRun, until: Until) -> None:
    """The run has been attacked from its beginning, and has learnt all the same."""

    def losses(entries: list[TapeEntry]) -> float:
        known = [m.loss for entry in entries for m in entry.members if m.island in process_run.islands]
        return fmean(loss for loss in known if not math.isnan(loss))

    until(lambda: process_run.transport.reader.tape(1)[-1].step > LEARNT_STEPS, "a few hundred steps")
    tape = process_run.transport.reader.tape(1 << 12)
    assert losses(tape[-48:]) < LEARNT_LOSS
