"""A starting worker waits for its Redis, and caches compiled programs in a private folder only."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path

import platformdirs
import pytest

from archipelago.broker import process
from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError, UnreachableError, few_of
from archipelago.broker.process import (
    CACHE_VARIABLE,
    PAUSE_SECONDS,
    AwaitedRun,
    Patience,
    compiled_once,
    guarded,
    keep_compiled,
)
from tests.failing import failing


class Outage:
    """A clock, and a server that answers from `ends_at` on."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at, self.now, self.asked = ends_at, 100.0, 0

    def answer(self) -> str:
        self.asked += 1
        if self.now < self.ends_at:
            raise UnreachableError("redis://away does not answer (refused)", "Is it running?")
        return "PONG"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, seconds: float, stops_at: float = 1e9) -> Patience:
        return Patience(seconds, lambda: self.now >= stops_at, lambda: self.now, self.sleep)


def test_a_call_is_repeated_until_the_server_answers(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(ends_at=103.0)
    with caplog.at_level(logging.WARNING):
        assert outage.patience(30.0)(outage.answer) == "PONG"
    assert outage.now == 103.0
    (said,) = caplog.messages  # one warning, with the error and its remedy
    assert said == "redis://away does not answer (refused). Is it running? Trying again for 30 s."


def test_the_last_error_is_raised_in_the_end_and_each_call_gets_the_full_time() -> None:
    for seconds, tries in ((0.0, 1), (3.0, 1 + 3 / PAUSE_SECONDS)):
        outage = Outage(ends_at=1e9)
        with failing(UnreachableError):
            outage.patience(seconds)(outage.answer)
        assert (outage.asked, outage.now) == (tries, 100.0 + seconds)
    outage = Outage(ends_at=102.0)
    awaited = outage.patience(3.0)
    awaited(outage.answer)
    outage.ends_at = outage.now + 2.5
    assert awaited(outage.answer) == "PONG"


def test_a_message_names_a_few_of_many() -> None:
    assert [few_of(["a", "b", "c"], most) for most in (2, 3)] == ["a, b and 1 more", "a, b, c"]
    assert few_of([]) == "none"


def test_a_signal_ends_the_repetitions() -> None:
    outage = Outage(ends_at=1e9)
    with pytest.raises(KeyboardInterrupt):
        outage.patience(30.0, stops_at=101.0)(outage.answer)
    assert outage.now == 101.0
    awaited = AwaitedRun(stopped_status=75).patience(lambda: True)
    assert guarded(lambda: len(awaited(outage.answer))) == 75


def test_an_error_that_waiting_cannot_fix_is_raised_at_once() -> None:
    def answer() -> None:
        raise error

    for error in (UnknownRunError("no run"), BrokerError("wrong password")):
        outage = Outage(ends_at=0.0)
        with pytest.raises(type(error)):
            outage.patience(30.0)(answer)
        assert outage.now == 100.0
    error, outage = UnknownRunError("no run"), Outage(ends_at=0.0)
    with failing(UnknownRunError, "broker.unknown-run"):  # a merger waits for its run, but not for ever
        outage.patience(3.0)(answer, for_run=True)
    assert outage.now == 103.0
    for seconds in (-1.0, float("nan"), float("inf")):
        with failing(ConfigError, "config.value"):
            AwaitedRun(wait_seconds=seconds).patience(lambda: False)


# -- the cache of compiled programs ------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "archipelago" / "jax"


def test_a_cache_folder_becomes_private(cache: Path) -> None:
    keep_compiled()
    assert os.environ[CACHE_VARIABLE] == str(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o755)
    keep_compiled()
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_folder_that_others_can_write_to_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that the user chose is checked, too."""
    cache.mkdir(parents=True)
    for mode in (0o770, 0o702):
        caplog.clear()
        cache.chmod(mode)
        keep_compiled()
        assert CACHE_VARIABLE not in os.environ
        assert len(caplog.records) == 1
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    keep_compiled()
    assert CACHE_VARIABLE not in os.environ
    monkeypatch.setenv(CACHE_VARIABLE, "gs://bucket/programs")
    keep_compiled()
    assert os.environ[CACHE_VARIABLE] == "gs://bucket/programs"


def test_programs_are_compiled_by_one_process_of_a_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_compiled()
    happened: list[str] = []
    with ExitStack() as other:
        other.enter_context(compiled_once("programs"))
        with compiled_once("others"):
            happened.append("compiled others")

        def ended(_: float) -> None:
            happened.append("waited")
            other.close()

        monkeypatch.setattr(time, "sleep", ended)
        with compiled_once("programs"):
            happened.append("read")
    assert happened == ["compiled others", "waited", "read"]
    with compiled_once("programs"), compiled_once("programs"):
        happened.append("read again")  # no process waits once the programs are compiled
    assert happened[3:] == ["read again"]


def test_processes_do_not_wait_for_one_that_is_stopped_or_dies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_compiled()
    happened: list[str] = []
    dies = ExitStack()
    dies.enter_context(compiled_once("programs"))

    def died(_: float) -> None:
        happened.append("waited")
        dies.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    monkeypatch.setattr(time, "sleep", died)
    with compiled_once("programs"):  # it has compiled nothing
        happened.append("compiled")
    assert happened == ["waited", "compiled"]
    monkeypatch.setattr(process, "COMPILING_SECONDS", 0.0)
    with compiled_once("others"), compiled_once("others"):
        happened.append("compiled alone")
    assert happened[2:] == ["compiled alone"]


def test_a_cache_folder_of_another_user_or_that_others_can_replace_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = cache.parent / "elsewhere"
    elsewhere.mkdir(parents=True)
    cache.symlink_to(elsewhere)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: elsewhere.stat().st_uid + 1)
        keep_compiled()
    assert CACHE_VARIABLE not in os.environ
    cache.unlink()
    cache.parent.chmod(0o777)
    keep_compiled()
    assert CACHE_VARIABLE not in os.environ
