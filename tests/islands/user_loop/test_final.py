"""`run.final`: the run's own parameters for a script that has left, whoever merged them last."""

from __future__ import annotations

import math
import time

import numpy as np

from archipelago.broker.errors import BrokerError, ConfigError
from archipelago.broker.redis.administration import delete_shard
from archipelago.broker.redis.transport import connect
from archipelago.merger.service import Merger
from tests.failing import failing
from tests.islands.user_loop.any_framework import Framework, Script, merged_by, served
from tests.islands.user_loop.conftest import SYNC


def train(*scripts: Script) -> None:
    """Train all to the end of the run, each at its own speed."""
    while not all(script.session.finished for script in scripts):
        for number, script in enumerate(scripts):
            script.train(1, by=0.01 * (number + 1))
        time.sleep(0.001)


def assert_final(script: Script, merger: Merger) -> None:
    expected = merged_by(merger)
    found = script.values()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_every_island_gets_the_parameters_of_the_end(framework: Framework, url: str) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=24)
    first, second = framework.join(url, island="first"), framework.join(url, island="second")
    with failing(ConfigError, "loop.left"):
        first.session.final()
    with served(url) as merger:
        with first, second:
            first.train()
            with failing(ConfigError, "loop.left"):
                first.session.final()
            train(first, second)
            with failing(BrokerError, "island.not-merged") as caught:
                first.session.final(timeout=0.3)
            assert "second" in caught.value.what, "it may send more"
            with failing(ConfigError, "loop.left"):
                first.sync()
        for script in (first, second, first):
            script.session.final()
            assert_final(script, merger)
        assert (first.session.reason, second.session.reason) == ("completed", "completed")
        counters = connect(url, "own").reader.counters()
        assert counters.published == counters.merged + counters.refused


def test_without_a_merger_it_says_so_and_a_later_call_succeeds(framework: Framework, url: str) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=24)
    with framework.join(url) as script:
        with served(url) as merger:
            train(script)
        merger.transport.merger.release(merger.epoch)
        script.train(3)
        with failing(BrokerError, "island.not-merged") as caught:
            script.session.final(timeout=0.2)
        assert "no merger" in caught.value.what
    with served(url) as merger:
        script.session.final()
        assert_final(script, merger)
    with failing(ConfigError, "config.value"):
        script.session.final(timeout=math.nan)


def test_an_island_that_leaves_early_gets_the_newest_parameters_with_its_own_work(
    framework: Framework, url: str
) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=10_000)
    with framework.join(url) as script:
        script.train(6)
    with failing(BrokerError, "island.not-merged"):
        script.session.final(timeout=0.1)
    with served(url) as merger:
        script.session.final()
        assert merger.state.closed > 0
        assert_final(script, merger)
    assert script.session.reason == "left"


def test_the_parameters_of_another_run_of_that_name_are_not_taken(framework: Framework, url: str) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=10_000)
    with framework.join(url) as script:
        script.train(2)
    delete_shard(connect(url, "own").connection)
    assert framework.create(url, "own", framework.model(more=1.0), sync=SYNC, steps=10_000)
    with failing(ConfigError, "island.other-run"):
        script.session.final(timeout=0.0)
