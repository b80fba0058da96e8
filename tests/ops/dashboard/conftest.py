"""A run of 16 islands, its page on a server, and that page in a browser."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from archipelago.broker.memory.transport import MemoryBroker, MemoryTransport
from archipelago.broker.messages import Evaluation, Note, Refusal
from archipelago.ops.dashboard.main import serving
from archipelago.ops.dashboard.page_data import Boards
from archipelago.ops.watch.reading import Watcher
from tests import samples
from tests.conftest import Until

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

MANIFEST = samples.manifest()
NAMES = [*(f"island-{n}" for n in range(15)), "A" * 64]
TROUBLE = "thin link at 3.2 Mbit/s up: fewer bits"


@pytest.fixture(scope="package")
def driver() -> Iterator[WebDriver]:
    """Return one headless Chromium for all tests, which only contacts us.

    Without a browser, the tests are skipped. If `CI` is set and ARCHIPELAGO_NO_BROWSER is not, they fail.
    """
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program, service = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    if program is None or service is None or find_spec("selenium") is None:
        required = os.environ.get("CI") and not os.environ.get("ARCHIPELAGO_NO_BROWSER")
        (pytest.fail if required else pytest.skip)("Install chromium, chromium-driver and selenium.")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    with tempfile.TemporaryDirectory(prefix="dash-") as profile:
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(argument)
        found = webdriver.Chrome(options, webdriver.ChromeService(service))
        try:
            yield found
        finally:
            found.quit()


def close_round(transport: MemoryTransport, number: int) -> None:
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    commit = samples.commit([], round_number=number)
    members = tuple(samples.member(name, staleness=n % 2) for n, name in enumerate(NAMES))
    tape = replace(commit.tape, members=members, digest=f"{number:032x}", live=16, merge_seconds=0.02)
    transport.merger.commit(epoch, replace(commit, tape=tape))  # Nothing was published for these rounds.


@pytest.fixture
def transport() -> MemoryTransport:
    """Return a run of 16 islands and 40 rounds, with events of each kind. One has a long name, one a bad link."""
    # The clock stands still, so that no island times out, however slow the browser is.
    transport = samples.begin(MemoryBroker(clock=lambda: 1000.0).connect("sample"))
    for name in NAMES:
        transport.island.heartbeat(samples.heartbeat(name, host=f"{name}.cluster.internal"))
    transport.island.heartbeat(samples.heartbeat(NAMES[3], link=TROUBLE, refused=2, last_refusal="23 versions behind"))
    transport.island.heartbeat(samples.heartbeat(NAMES[4], "left"))
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    samples.refuse(transport, epoch, [(entry, Refusal("a", "x", 0, 1, 0, 100, "the digest is wrong"))])
    for kind in ("joined", "left", "diverged", "served", "steered", "paused", "resumed", "expelled", "checkpoint"):
        transport.reader.note(Note(1.7e9, NAMES[-1], kind, "what happened, in words that go on for a while " * 3))
    for number in range(1, 41):
        close_round(transport, number)
        transport.reader.record_evaluation(Evaluation(number, 4, 800 * number, 1.7e9, 2.0 + 5.0 / number))
    return transport


@pytest.fixture
def address(transport: MemoryTransport) -> Iterator[str]:
    """Serve the page of that run, and yield its address."""
    with serving(Boards(Watcher(transport)), "127.0.0.1", 0) as found:
        yield f"{found}/runs/sample"


class Page:
    """A page in the browser."""

    def __init__(self, driver: WebDriver, until: Until) -> None:
        self.driver, self.until = driver, until

    def width(self, pixels: int) -> None:
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": pixels < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, where: str, charts: int = 2) -> None:
        """Open an address, and wait for that many charts."""
        self.driver.get("about:blank")
        self.driver.get(where)
        drawn = "return document.querySelectorAll('.chart[data-drawn] .main-svg:first-child').length >= arguments[0]"
        self.until(lambda: self.run(drawn, charts), "the charts are drawn")

    def run(self, script: str, *args: object) -> Any:
        return self.driver.execute_script(script, *args)

    def text(self, place: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", place))

    def is_shown(self, place: str) -> bool:
        return bool(self.run("return document.querySelector(arguments[0]).checkVisibility()", place))

    def line(self, chart: str, trace: int = 0) -> Any:
        """Return the coordinates of a line of a chart."""
        script = (
            "const d = document.getElementById(arguments[0]).data[arguments[1]];"
            " return [Array.from(d.x, x => x instanceof Date ? x.toISOString() : x), Array.from(d.y)]"
        )
        return self.run(script, chart, trace)

    def complaints(self) -> list[str]:
        """Return the new errors of its scripts."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def click(self, place: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", place)


@pytest.fixture
def page(driver: WebDriver, until: Until) -> Iterator[Page]:
    """A wide page, which has complained of nothing yet."""
    made = Page(driver, until)
    made.width(1400)
    made.complaints()
    yield made
    driver.get("about:blank")  # so that it asks its server no more, and takes no time from other tests
