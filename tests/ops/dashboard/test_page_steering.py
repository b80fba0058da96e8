"""Steering in a browser: what needs the token, and how settings and islands are changed."""

from __future__ import annotations

import pytest

from archipelago.broker.memory.transport import MemoryTransport
from tests.conftest import Until
from tests.ops.dashboard.conftest import NAMES, TOKEN, Page

pytestmark = pytest.mark.full  # These tests drive a browser.


def test_an_action_needs_the_token(page: Page, address: str, until: Until, transport: MemoryTransport) -> None:
    page.open(address)
    assert not page.is_shown("#merging")
    assert not page.is_shown(".actions")
    page.type_into("#token", "wrong")
    page.click("#unlock button")
    until(lambda: page.text("#answer") != "", "the page reports it")
    assert not page.is_shown("#merging")
    page.run("document.querySelector('#answer').textContent = ''; steer({merging: 'paused'})")
    until(lambda: page.text("#answer") != "", "the server refuses it")
    assert transport.reader.control() == {}
    page.type_into("#token", TOKEN)
    page.click("#unlock button")
    until(lambda: page.is_shown("#merging"), "the knobs are there")
    page.click("#merging")
    until(lambda: transport.reader.control() == {"merging": "paused"}, "merging is paused")
    until(lambda: "paused" in page.text("#answer"), "the answer confirms it")
    until(lambda: page.text("#state") == "paused", "the page shows it")
    until(lambda: page.text("#merging") == "Resume merging", "the button turns")
    page.click("#merging")
    until(lambda: transport.reader.control() == {}, "merging goes on")
    page.open(address)
    until(lambda: page.is_shown("#merging"), "this window remembers the token")
    page.click("#forget")
    assert not page.is_shown("#merging")


def test_settings_and_islands_are_steered(page: Page, address: str, until: Until, transport: MemoryTransport) -> None:
    page.open(f"{address}/#token={TOKEN}")
    assert TOKEN not in page.driver.current_url
    until(lambda: page.is_shown("#merging"), "the address holds the token")
    until(lambda: page.run("return document.querySelector('#k-rate').value") == "0.7", "the run's own")
    page.type_into("#k-rate", "fast")
    page.click("[data-name='outer.learning_rate'] button")
    until(lambda: "fast" in page.text("#answer"), "a wrong value is explained")
    until(lambda: "fast" in page.text("#why-k-rate"), "beside its field")
    assert page.run("return document.querySelector('#k-rate').getAttribute('aria-invalid')") == "true"
    assert transport.reader.control() == {}
    page.type_into("#k-rate", "0.5")
    page.click("[data-name='outer.learning_rate'] button")
    until(lambda: transport.reader.control() == {"outer.learning_rate": "0.5"}, "the rate is set")
    until(lambda: not page.is_shown("#why-k-rate"), "the field is good again")
    until(lambda: "0.5 (steered" in page.text("#settings-rows"), "the settings show it")
    own = "[data-name='outer.learning_rate'] [data-own]"
    until(lambda: not page.run("return document.querySelector(arguments[0]).disabled", own), "it is shown")
    page.click(own)
    until(lambda: transport.reader.control() == {}, "and taken back")
    deeds = f"document.querySelector(\"[title='{NAMES[0]}']\").closest('.lane').querySelectorAll('.actions button')"
    page.run(f"{deeds}[1].click()")
    assert transport.reader.control() == {}  # The button asks for confirmation first.
    # On a slow machine the time to confirm may be over by now. The button then asks again.
    page.run(f"const it = {deeds}[1]; if (it.textContent !== 'confirm?') it.click(); it.click()")
    until(lambda: transport.reader.control() == {f"island.{NAMES[0]}": "expel"}, "the island is expelled")
    until(lambda: page.run(f"return {deeds}[2].checkVisibility()"), "the island can be readmitted")
    page.run(f"{deeds}[2].click(); {deeds}[2].click()")
    until(lambda: transport.reader.control() == {}, "the island is readmitted")
