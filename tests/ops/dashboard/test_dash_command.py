"""The server of the dashboard and the command `dash`: readings, options, the process, and needed packages."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.redis.transport import connect
from archipelago.ops.commands import run
from archipelago.ops.dashboard.app import application
from archipelago.ops.dashboard.main import serving
from archipelago.ops.dashboard.page_data import Boards
from archipelago.ops.watch.reading import Watcher
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.ops.dashboard.test_dashboard import MANIFEST, a_run, close_round


@pytest.fixture
def url(url: str) -> str:
    """Return the URL of a database with one run, `sample`."""
    create(url, "sample")
    return url


def create(url: str, run: str) -> None:
    manifest = replace(MANIFEST, run=run)
    with closing(connect(url, run)) as transport:
        transport.create(manifest, samples.first_snapshots(manifest))


def shown(address: str, charts: int = 0) -> Any:
    with urllib.request.urlopen(f"{address}/api/runs/sample/view?charts={charts}", timeout=30) as answer:  # noqa: S310
        return json.load(answer)


def test_a_page_gets_each_reading_and_new_charts_and_the_threads_end_with_the_server(until: Until) -> None:
    transport = a_run(MemoryBroker())
    with serving(Boards(Watcher(transport)), "127.0.0.1", 0) as address:
        until(lambda: shown(address)["page"] is not None, "a first reading")
        first = shown(address)
        assert (first["page"]["rounds"], first["charts"]["lines"]["round"]) == (1, [1])
        close_round(transport, 2)
        until(lambda: shown(address)["page"]["rounds"] == 2, "the round")
        until(lambda: shown(address)["charts"]["lines"]["round"] == [1, 2], "its charts")
        until(lambda: shown(address, shown(address)["number"])["charts"] is None, "an answer without charts")
    assert not [thread for thread in threading.enumerate() if thread.name == "pages"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_waits_for_its_run_and_a_signal_ends_it_while_a_page_is_connected(url: str, number: signal.Signals) -> None:
    words = ["dash", url, "--run", "later", "--port", "0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "archipelago", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "there is no run 'later'" in process.stderr.readline()
        create(url, "later")
        told = json.loads(process.stdout.readline())
        greeting = process.stderr.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+) ", greeting)
        assert found, greeting
        assert told == {"run": "later", "address": found[1]}
        with closing(http.client.HTTPConnection(found[1].removeprefix("http://"))) as connection:
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
            process.send_signal(number)
            assert process.wait() == 0
        assert process.stderr.read() == "", "nothing about its end"


def test_the_dashboard_needs_its_extra_but_other_verbs_do_not(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("starlette", "uvicorn", "plotly"):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] == package or "dashboard" in name]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            with failing(ConfigError, "config.extra"):
                run(["dash", url, "--run", "sample"])
    for package in ("starlette", "uvicorn", "plotly"):
        monkeypatch.setitem(sys.modules, package, None)
    with failing(ConfigError, "config.extra"):
        application(None)  # type: ignore[arg-type]
    assert run(["--help"]) == 0
    assert run(["status", url, "--run", "sample"]) == 1
