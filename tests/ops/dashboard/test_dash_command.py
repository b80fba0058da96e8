"""The server of the dashboard and the command `dash`: live events, options, the process, and needed packages."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.redis.transport import connect
from archipelago.ops.commands import run
from archipelago.ops.dashboard.app import application
from archipelago.ops.dashboard.main import TOKEN_VARIABLE, serving
from archipelago.ops.watch.watcher import Watcher
from tests import samples
from tests.failing import failing
from tests.ops.dashboard.test_dashboard import MANIFEST, TOKEN, a_run, close_round


@pytest.fixture
def url(url: str) -> str:
    """Return the URL of a database with one run, `sample`."""
    transport = connect(url, "sample")
    transport.create(MANIFEST, samples.first_snapshots(MANIFEST))
    transport.close()
    return url


@contextmanager
def stream(address: str) -> Iterator[http.client.HTTPResponse]:
    host, port = address.removeprefix("http://").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        connection.request("GET", "/api/events")
        with connection.getresponse() as answer:
            yield answer


def next_event(answer: http.client.HTTPResponse, wanted: str) -> Any:
    while line := answer.readline().decode():
        if line == f"event: {wanted}\n":
            return json.loads(answer.readline().decode().removeprefix("data: "))
    pytest.fail("the stream ended")


def test_events_come_live_and_the_stream_ends_with_the_server() -> None:
    transport = a_run(MemoryBroker())
    watch = Watcher(transport)
    with ExitStack() as server, ExitStack() as page:
        address = server.enter_context(serving(watch, TOKEN, "127.0.0.1", 0))
        answer = page.enter_context(stream(address))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert next_event(answer, "page")["run"]["rounds"] == 1
        assert next_event(answer, "charts")["lines"]["round"] == [1]
        close_round(transport, 2)
        while next_event(answer, "page")["run"]["rounds"] != 2:
            pass
        while next_event(answer, "charts")["lines"]["round"] != [1, 2]:
            pass
        server.close()  # The page is connected meanwhile.
        assert not answer.read().endswith(b"data: ")
    assert not [thread for thread in threading.enumerate() if thread.name == "pages"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_a_page_is_connected(url: str, number: signal.Signals) -> None:
    words = ["dash", url, "--run", "sample", "--port", "0", "--no-open", "--json"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "archipelago.ops", *words],
        env={**os.environ, TOKEN_VARIABLE: TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        told = json.loads(process.stdout.readline())
        greeting = process.stderr.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/#token=open-sesame", greeting)
        assert found, greeting
        assert told == {"run": "sample", "address": found[1], "token": TOKEN}
        with stream(found[1]) as answer:
            assert next_event(answer, "page")["run"]["run"] == "sample"
            process.send_signal(number)
            assert process.wait() == 0
        assert process.stderr.read().count("\n") == 1  # It prints the token, and nothing about its end.


@pytest.mark.full
def test_it_loads_no_jax_and_no_plotly() -> None:
    code = "import sys, archipelago.ops.dashboard.main, archipelago.ops.dashboard.app, uvicorn; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("archipelago.").partition(".")[0] for name in done.stdout.split()}
    assert {"starlette", "uvicorn", "redis"} <= loaded
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "islands", "plotly", "matplotlib"}


def test_the_dashboard_needs_its_extra_but_other_verbs_do_not(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("starlette", "uvicorn", "plotly"):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] == package or "dashboard" in name]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            with failing(ConfigError, "config.extra"):
                run(["dash", url, "--run", "sample", "--no-open"])
    for package in ("starlette", "uvicorn", "plotly", "matplotlib", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    with failing(ConfigError, "config.extra"):
        application(None, TOKEN)  # type: ignore[arg-type]
    assert run(["--help"]) == 0
    assert run(["status", url, "--run", "sample"]) == 1
