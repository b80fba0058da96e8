"""Hostile islands in virtual time: what they send, their trials, and what the results compare them with."""

from __future__ import annotations

import numpy as np
import pytest

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.wire import digest, pack, unpack
from archipelago.ops.experiments.island_runs import CLAIMED, FORGERIES, LITTLE, HostileClient, Public
from archipelago.ops.experiments.results import baseline, grouped
from archipelago.ops.experiments.trial import ATTACKS, Trial, key_of
from tests import samples
from tests.ops.experiments.trials import record_of


def test_a_forgery_has_a_header_that_fits_it() -> None:
    assert set(ATTACKS) == FORGERIES.keys() | LITTLE.keys(), "studies and forgeries name the same attacks"
    manifest = samples.manifest()
    delta_N = np.random.default_rng(0).standard_normal(manifest.sizes[0], np.float32)
    payload = pack(delta_N, "float32", 1)
    for attack in ATTACKS:
        transport = MemoryBroker().connect("sample")
        transport.create(manifest, samples.first_snapshots(manifest))
        client = HostileClient(transport.island, manifest, attack, 7, {0: {"b": delta_N, "c": 3 * delta_N}})
        client.publish(samples.contribution(payload), payload)
        (delivery,) = transport.merger.updates(0.0)
        found = delivery.with_payload()
        assert found.contribution is not None
        assert (found.contribution.digest, found.contribution.bytes) == (digest(found.payload), len(found.payload))
        assert found.contribution.tokens == 100 * (CLAIMED if attack in LITTLE else 1), attack
        sent_N = unpack(found.payload, manifest.sizes[0])
        factor = {"flip": -1, "scale": 3, "labels": 1, "stale": -1}.get(attack)
        if factor is not None:
            np.testing.assert_array_equal(sent_N, factor * delta_N, attack)
        elif attack in LITTLE:  # the mean is twice, and the deviation once what b sends
            np.testing.assert_allclose(sent_N, 2 * delta_N - LITTLE[attack] * np.abs(delta_N), rtol=1e-5, atol=1e-6)
        else:
            assert not np.allclose(sent_N, delta_N), attack
            assert np.linalg.norm(sent_N) == pytest.approx(np.linalg.norm(delta_N), rel=1e-5), attack


def test_what_honest_islands_send_is_noted_for_the_hostile_ones() -> None:
    manifest, public = samples.manifest(), Public()
    transport = MemoryBroker().connect("sample")
    transport.create(manifest, samples.first_snapshots(manifest))
    delta_N = np.random.default_rng(0).standard_normal(manifest.sizes[0], np.float32)
    payload = pack(delta_N, "float32", 1)
    HostileClient(transport.island, manifest, "", 7, public).publish(samples.contribution(payload), payload)
    np.testing.assert_array_equal(public[0]["a"], delta_N)
    assert transport.merger.updates(0.0)[0].contribution == samples.contribution(payload)


def hostile_trial(islands: int = 4, hostile: int = 0, attack: str = "", scores: bool = True, seed: int = 0) -> Trial:
    settings = {"data.corpus": "small-text", "inner.steps": 24, "merge.scores": scores}
    return Trial.of(settings, seed, islands=islands, hostile=hostile, attack=attack)


def test_attacks_are_a_part_of_a_trials_identity() -> None:
    honest, attacked = hostile_trial(), hostile_trial(hostile=1, attack="flip")
    assert honest.key != attacked.key
    assert hostile_trial(attack="flip") == honest, "nobody is hostile"
    assert key_of(record_of(honest)) == honest.key


def test_a_row_is_compared_with_the_run_without_its_hostile_islands() -> None:
    def record(trial: Trial, loss: float) -> dict[str, object]:
        return record_of(trial, loss) | {"hostile": trial.hostile, "attack": trial.attack}

    rows = grouped(
        [
            record(hostile_trial(4, 1, "flip"), 2.02),
            record(hostile_trial(4, 1, "flip", scores=False), 2.4),
            record(hostile_trial(4), 2.2),
            record(hostile_trial(4, scores=False), 2.2),
            record(hostile_trial(3, scores=False), 2.0),
        ]
    )
    assert [row.ratios(baseline(row, rows)) for row in rows] == [
        [pytest.approx(1.01)],
        [pytest.approx(1.2)],
        [pytest.approx(1.0)],
        [],
        [],
    ]
