"""The probes: what they say in each phase of a worker, and over HTTP beside the metrics."""

from __future__ import annotations

import urllib.error
import urllib.request

from archipelago.broker.observe import metrics
from archipelago.broker.observe.health import HANG_SECONDS, Health


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_is_alive_at_once_and_ready_once_its_loop_runs() -> None:
    health, stops = Health(Clock()), [False, True]
    assert (health.alive(), health.ready()) == ((True, "starting"), (False, "starting"))
    stopped = health.watched(lambda: stops.pop(0), lambda: "training")
    assert not health.ready()[0], "the loop has not begun"
    assert not stopped()
    assert (health.alive(), health.ready()) == ((True, "training"), (True, "training"))
    assert stopped()
    assert (health.alive(), health.ready()) == ((True, "leaving"), (False, "leaving"))


def test_a_loop_without_turns_is_dead_after_a_long_time_and_comes_back_with_a_turn() -> None:
    clock = Clock()
    health = Health(clock)
    stopped = health.watched(lambda: False, lambda: "training")
    stopped()
    clock.now += HANG_SECONDS
    assert health.alive()[0], "a slow turn is no reason to be killed"
    clock.now += 1.0
    assert not health.alive()[0] and not health.ready()[0]
    stopped()
    assert health.alive()[0] and health.ready()[0]


def test_a_worker_may_start_and_leave_for_as_long_as_it_takes() -> None:
    clock = Clock()
    health = Health(clock)
    clock.now += 10 * HANG_SECONDS
    assert health.alive()[0]
    health.watched(lambda: False, lambda: "training")()
    health.leave()
    clock.now += 10 * HANG_SECONDS
    assert health.alive()[0]


def test_the_phase_is_the_present_one() -> None:
    health, epoch = Health(Clock()), [0]
    health.watched(lambda: False, lambda: "serving" if epoch[0] else "standing by")()
    assert health.ready() == (True, "standing by")
    epoch[0] = 3
    assert health.ready() == (True, "serving")


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_probes_are_served_beside_the_metrics() -> None:
    health = Health()
    port = metrics.serve(0, "127.0.0.1", metrics.new_registry(), health)
    assert answer(port, "/healthz") == (200, "starting\n")
    assert answer(port, "/readyz") == (503, "starting\n")
    health.watched(lambda: False, lambda: "training")()
    assert answer(port, "/readyz") == (200, "training\n")
    health.watched(lambda: False, lambda: "standing by")()
    assert answer(port, "/healthz") == answer(port, "/readyz") == (200, "standing by\n"), "an answer of another length"
    assert answer(port, "/metrics")[0] == 200
