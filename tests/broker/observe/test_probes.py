"""Probes: what they say in each phase of a worker, and over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe import probes
from archipelago.broker.observe.options import ProbeOptions, WorkerOptions
from archipelago.broker.observe.probes import HANG_SECONDS, Health
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests.failing import failing


def test_an_address_that_cannot_be_served_is_an_error_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for number, host in (
            (port, "127.0.0.1"),
            (-1, "127.0.0.1"),
            (65536, "127.0.0.1"),
            (0, "192.0.2.1"),
            (0, "a" * 64),
        ):
            with failing(ConfigError, "config.value"):
                ProbeOptions(number, host).answer_probes(Health())


def test_children_get_the_same_options() -> None:
    options = WorkerOptions(tensorboard=False, log_json=True, bucket="memory://b")
    assert options.curve_flags() == ["--no-tensorboard", "--log-json"]
    assert options.flags() == ["--no-tensorboard", "--log-json", "--bucket", "memory://b"]
    assert WorkerOptions().flags() == []


def test_a_worker_is_alive_at_once_and_ready_once_its_loop_runs() -> None:
    health, stops = Health(VirtualClock(1000.0)), [False, True]
    assert (health.alive(), health.ready()) == ((True, "starting"), (False, "starting"))
    stopped = health.watched(lambda: stops.pop(0), lambda: "training")
    assert not health.ready()[0], "the loop has not begun"
    assert not stopped()
    assert (health.alive(), health.ready()) == ((True, "training"), (True, "training"))
    assert stopped()
    assert (health.alive(), health.ready()) == ((True, "leaving"), (False, "leaving"))


def test_only_a_loop_without_turns_is_dead_after_a_long_time() -> None:
    clock = VirtualClock(1000.0)
    health = Health(clock)
    clock.now += 10 * HANG_SECONDS
    assert health.alive()[0], "it may start for as long as it takes"
    stopped = health.watched(lambda: False, lambda: "training")
    stopped()
    clock.now += HANG_SECONDS
    assert health.alive()[0], "a slow turn is no reason to be killed"
    clock.now += 1.0
    assert not health.alive()[0] and not health.ready()[0]
    stopped()
    assert health.alive()[0] and health.ready()[0], "it comes back with a turn"
    health.leave()
    clock.now += 10 * HANG_SECONDS
    assert health.alive()[0], "it may leave for as long as it takes"


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SILENT_SECONDS", 0.01)
    port = probes.serve(0, "127.0.0.1", Health())
    with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
        assert silent.recv(1) == b""


def test_probes_are_served() -> None:
    health, epoch = Health(), [0]
    port = probes.serve(0, "127.0.0.1", health)
    assert answer(port, "/healthz") == (200, "starting\n")
    assert answer(port, "/readyz") == (503, "starting\n")
    health.watched(lambda: False, lambda: "serving" if epoch[0] else "standing by")()
    assert answer(port, "/healthz") == answer(port, "/readyz") == (200, "standing by\n"), "an answer of another length"
    epoch[0] = 3
    assert answer(port, "/readyz") == (200, "serving\n"), "the present phase"
    assert answer(port, "/metrics")[0] == 404
