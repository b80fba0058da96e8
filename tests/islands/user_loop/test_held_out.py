"""Held-out losses of scripts: what they report, and the merged parameters that one of them evaluates."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from archipelago.broker.config import MergeConfig
from archipelago.broker.errors import ConfigError, UnreachableError
from archipelago.broker.messages import Evaluation
from archipelago.broker.observe.losses import loss_unit
from archipelago.broker.redis.reader import RedisReader
from archipelago.broker.redis.transport import connect
from archipelago.islands.sync import evaluator
from archipelago.islands.user_loop import held_out
from tests.conftest import Until
from tests.failing import failing
from tests.islands.user_loop.any_framework import STEP, Framework, merged_by, served
from tests.islands.user_loop.conftest import SYNC


def recorded(url: str) -> list[Evaluation]:
    return connect(url, "own").reader.evaluations()


def losses(url: str) -> list[float]:
    transport = connect(url, "own")
    unit = loss_unit(transport.reader.manifest().corpus)
    return [unit.from_evaluation(each.bits_per_byte) for each in transport.reader.evaluations()]


NO_LOSSES: list[Any] = [math.nan, math.inf, 1e300, "0.5", b"1", True, None, [0.5], np.ones(2), object(), 1j]


def test_a_script_reports_what_it_has_measured(framework: Framework, url: str, until: Until) -> None:
    array = framework.array
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    with failing(ConfigError, "loop.left"):
        framework.join(url).session.report(held_out=1.0)
    with framework.join(url, island="a") as script:
        for wrong in [*NO_LOSSES, array([1.0, 2.0]), array(math.nan)]:
            with failing(ConfigError, "loop.argument"):
                script.session.report(held_out=wrong)
        script.session.report(held_out=2.5)
        until(lambda: recorded(url), "the first loss")
        script.train(3)
        for loss in (np.float32(-1.5), array([0.25]), np.array([[3]])):
            script.session.report(held_out=loss)
    assert losses(url) == pytest.approx([2.5, -1.5, 0.25, 3.0], rel=1e-12), "the last ones are sent when it leaves"
    assert [(each.step, each.by) for each in recorded(url)] == [(0, "a"), *[(3, "a")] * 3]


def test_a_report_after_final_names_the_last_round(framework: Framework, url: str) -> None:
    framework.create(url, "own", framework.model(), sync=SYNC, steps=8)
    with served(url, linger_seconds=0.3), framework.join(url, island="a") as script:
        while not script.session.finished:
            script.train()
    script.session.final(timeout=5.0)
    script.session.report(held_out=2.0)
    assert recorded(url)[-1].round == connect(url, "own").reader.tape(1)[-1].round


def test_a_report_after_the_end_says_that_it_is_lost(
    framework: Framework, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    with framework.join(url, island="a") as script:
        script.train(1)
    script.session.report(held_out=2.0)
    assert losses(url) == pytest.approx([2.0])

    def unreachable(*args: Any) -> None:
        raise UnreachableError("no answer", "Wait.")

    monkeypatch.setattr(RedisReader, "record_evaluation", unreachable)
    with failing(UnreachableError):
        script.session.report(held_out=1.0)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the evaluators look at once whether something is to be done."""
    for module in (evaluator, held_out):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.02)


class Watched:
    """A function that evaluates, and notes what it is given."""

    def __init__(self) -> None:
        self.seen: list[NDArray[np.float32]] = []
        self.threads: set[int] = set()

    def __call__(self, params: Any) -> Any:
        embedding = params["embedding"] if isinstance(params, dict) else params[0].weight
        assert isinstance(params, dict) or not (params.training or torch_computes_gradients())
        self.seen.append(np.array(embedding.tolist(), np.float32))
        self.threads.add(threading.get_ident())
        return embedding.mean()


def torch_computes_gradients() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.is_grad_enabled())


@pytest.mark.usefixtures("often")
def test_the_merged_parameters_are_evaluated_between_two_steps(framework: Framework, url: str, until: Until) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    evaluate = Watched()
    with framework.join(url, island="a", evaluate=evaluate) as script:
        expected = script.values()

        def evaluated() -> bool:
            script.train(1, 0.001)
            for name, value in script.values().items():
                expected[name] = expected[name] - np.float32(0.001)
                np.testing.assert_array_equal(value, expected[name])
            return bool(recorded(url))

        until(evaluated, "the first evaluation")
    assert len(evaluate.seen) == 1, "the next one is due after 15 s"
    assert (evaluate.seen[0] == 1.0).all(), "the run has merged nothing"
    assert evaluate.threads == {threading.get_ident()}
    assert [(each.round, each.by) for each in recorded(url)] == [(0, "a")]
    assert losses(url) == pytest.approx([1.0], rel=1e-12)


@pytest.mark.usefixtures("often")
def test_the_last_island_evaluates_the_final_parameters(framework: Framework, url: str) -> None:
    merge = MergeConfig(rest="average", embedding="average")  # compiles fast
    assert framework.create(url, "own", framework.model(), sync=SYNC, merge=merge, steps=16)
    evaluate = Watched()
    with served(url, linger_seconds=0.3) as merger:
        with framework.join(url, island="a", evaluate=evaluate) as script:
            while not script.session.finished:
                script.train()
                time.sleep(0.001)
        final = next(value for name, value in merged_by(merger).items() if value.shape == (8, 4))
        assert (final == evaluate.seen[-1]).all()
        assert recorded(url)[-1].round == merger.state.closed > 0
    assert connect(url, "own").island.lease_evaluation("b/x", 1.0)


@pytest.mark.usefixtures("often")
def test_a_failing_or_stalled_loop_leaves_the_lease_to_another_island(
    framework: Framework, url: str, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    with framework.join(url, island="a", evaluate=lambda params: "low") as failing_one:

        def failed() -> bool:
            failing_one.train(1, 0.001)
            return any("evaluates no more" in record.message for record in caplog.records)

        until(failed, "the failure")
        with framework.join(url, island="b", evaluate=Watched()) as stalled:
            holds = connect(url, "own").island.lease_evaluation

            def asked() -> bool:
                stalled.train(1, 0.001)
                return stalled.session._evaluator is not None and not holds("c/x", 0.0) and bool(recorded(url))

            until(asked, "the second island to evaluate")
            assert not holds("c/x", 1.0)
            stalled.loop.link.heartbeats.stall_seconds = 0.0
            until(lambda: holds("c/x", 1.0), "the lease")
        assert [each.by for each in recorded(url)] == ["b"]
        failing_one.train()


def test_an_interrupted_evaluation_gives_the_parameters_back(framework: Framework, url: str, until: Until) -> None:
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)

    def interrupted(_: Any) -> float:
        raise KeyboardInterrupt

    with framework.join(url, evaluate=interrupted) as script:
        script.step()

        def evaluates() -> bool:
            script.sync()
            return False

        with pytest.raises(KeyboardInterrupt):
            until(evaluates, "the interrupt")
        for name, value in script.values().items():
            np.testing.assert_array_equal(value, framework.run().first[name] - STEP)
        script.train()


def test_what_cannot_evaluate_is_refused(framework: Framework, url: str) -> None:
    for wrong in (lambda: 1.0, lambda params, data: 1.0, 0.5, "fn"):
        with failing(ConfigError, "loop.argument"):
            framework.join(url, evaluate=wrong)
