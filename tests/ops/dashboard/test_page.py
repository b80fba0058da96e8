"""The dashboard in a browser: it updates live, survives restarts, fits a phone and is readable."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NoReturn

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.memory.transport import MemoryTransport
from archipelago.broker.messages import Note
from archipelago.ops.dashboard.main import serving
from archipelago.ops.dashboard.page_data import Boards, chart_library
from archipelago.ops.watch.reading import Watcher
from archipelago.ops.watch.report import html, of_watch
from tests import samples
from tests.conftest import Until
from tests.ops.dashboard.conftest import NAMES, TROUBLE, Page, close_round

pytestmark = pytest.mark.full  # These tests drive a browser.

#: The lines of the chart "Does it learn?".
TRAINING, HELD_OUT = 1, 2

#: A script that returns the contrast of each text with its background, as defined by WCAG 2.2.
RATIOS = """
const canvas = document.createElement('canvas'), pen = canvas.getContext('2d', {willReadFrequently: true});
const rgba = (text) => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
const over = (top, under) => [0, 1, 2].map(n => top[n] * top[3] + under[n] * (1 - top[3])).concat(1);
const ground = (place) => { const own = rgba(getComputedStyle(place).backgroundColor);
  return own[3] === 1 || !place.parentElement ? own : over(own, ground(place.parentElement)); };
const light = (colour) => { const [r, g, b] = colour.slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const out = [];
for (const place of document.querySelectorAll('header *, main *')) {
  const text = [...place.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
  if (!text || !place.checkVisibility() || place.closest('svg')) continue;
  const under = ground(place), on = over(rgba(getComputedStyle(place).color), under);
  const [high, low] = [light(on), light(under)].sort((a, b) => b - a);
  out.push([(high + 0.05) / (low + 0.05), text.slice(0, 40)]);
}
return out;
"""


def test_the_page_shows_the_run_from_one_server(page: Page, address: str, until: Until) -> None:
    page.open(address)
    assert [page.text(f"#{name}") for name in ("run", "size", "live", "part")] == ["sample", "16", "15", "15"]
    assert page.text("#bits") == "2.1250"
    held_out, training = page.line("chart-learn", HELD_OUT), page.line("chart-learn", TRAINING)
    assert held_out[1][-1] == 2.125
    assert held_out[0][-1] == training[0][-1] == 40 * 16 * 100 / 2
    assert training[1][-1] == pytest.approx(2.5 / math.log(2), abs=1e-3)  # 2.5 nats per byte, in the same unit
    assert [page.line("chart-islands", n)[1][-1] for n in range(3)] == [16, 15, 15]  # as in the tiles
    assert page.run("return document.querySelectorAll('#islands tr').length") == 16
    row = f"[title='{NAMES[3]}']"
    assert TROUBLE in page.run("return document.querySelector(arguments[0]).closest('tr').textContent", row)
    events = page.text("#events")
    for kind in ("joined", "diverged", "served", "steered", "expelled", "the digest is wrong"):
        assert kind in events
    assert page.text("#b-published")
    until(lambda: page.text("#link span") == "live", "the page hears of the run")
    loaded = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert len(loaded) >= 4
    assert {re.match(r"https?://[^/]+", name)[0] for name in loaded} == {address[: -len("/runs/sample")]}  # type: ignore[index]
    small = "return [fixed(0.000123456, 4), fixed(-0.05), fixed(0, 4), fixed(0.1, 4), fixed(0.05, 2), fixed(null)]"
    assert page.run(small) == ["0.000123", "-0.0500", "0.0000", "0.1000", "0.05", "–"]
    assert re.search(r" at (\d+/\d+ )?\d\d:\d\d\.$", page.run("return ending(60)"))
    assert re.search(r" at \d+/\d+ \d\d:\d\d\.$", page.run("return ending(200000)"))
    page.open(f"{address}/sync")
    assert page.line("chart-staleness")[1] == [50, 50]
    assert page.is_shown("#b-published") and not page.is_shown("#bits")
    page.open(f"{address}/islands/{NAMES[3]}", charts=1)
    assert page.run("return [...document.querySelectorAll('#islands th')].map(e => e.title)") == [NAMES[3]]
    assert page.run("return document.getElementById('chart-losses').data.length") == 1
    page.driver.get(address[: -len("/runs/sample")])
    until(lambda: page.driver.current_url.endswith("/runs/sample"), "the only run needs no list")
    assert page.complaints() == []


def test_news_appear_without_reloading_and_never_as_markup(
    page: Page, address: str, until: Until, transport: MemoryTransport
) -> None:
    page.open(address)
    page.run("window.same = true")
    close_round(transport, 41)
    evil = "<img src=x onerror='window.evil = 1'></script><script>window.evil = 1</script>"
    transport.reader.note(Note(1.8e9, evil, "joined", evil))
    transport.island.heartbeat(samples.heartbeat("mallory", link=evil, last_refusal=evil, device=evil, host=evil))
    until(lambda: page.text("#step-sub").startswith("round 41"), "the round is shown")
    until(lambda: page.line("chart-islands")[0][-1] == 41, "the round is drawn")
    until(lambda: "mallory" in page.text("#islands"), "the island has its lane")
    until(lambda: evil in page.text("#events") and evil in page.text("#islands"), "the texts are shown unchanged")
    assert page.run("return window.evil === undefined && !document.querySelector('main img')")
    assert page.run("return window.same")  # The page was not reloaded.


def test_the_axes_show_tokens_rounds_or_times_and_early_losses(page: Page, address: str) -> None:
    page.open(address)
    tokens = page.line("chart-learn", TRAINING)[0]
    assert tokens == page.line("chart-learn", HELD_OUT)[0] == [n * 16 * 100 / 2 for n in range(1, 41)]
    page.click("[data-axis=round]")
    assert page.driver.current_url.endswith("?over=round"), "the address keeps the choice"
    assert page.line("chart-learn", TRAINING)[0] == page.line("chart-learn", HELD_OUT)[0] == list(range(1, 41))
    page.click("[data-axis=unix_seconds]")
    assert {value[:10] for value in map(str, page.line("chart-learn", HELD_OUT)[0])} == {"2023-11-14"}
    page.click("[data-axis=tokens]")
    assert page.line("chart-learn", TRAINING)[0] == tokens
    low, high = page.run("return document.getElementById('chart-learn')._fullLayout.yaxis.range")
    smooth, held_out = (page.line("chart-learn", n)[1] for n in (TRAINING, HELD_OUT))
    newer = [*smooth[20:], *held_out[20:]]
    assert low < min(newer) < max(newer) < high < max(held_out), "the newer half fits, and the beginning does not"


def test_problems_come_first_with_a_remedy_and_in_groups(
    page: Page, address: str, until: Until, transport: MemoryTransport
) -> None:
    page.open(address)
    assert TROUBLE.removeprefix("thin link ") in page.text("#problem-list")
    assert "[island.thin-link]" in page.text("#problem-list"), "by which the guide has it"
    assert not page.is_shown("#banner")  # Nobody has to do anything about a thin link.
    full = "page.problems = [{code: 'redis.memory', mood: 'warn'}]; writeTiles(page);"
    assert page.run(f"{full} return document.getElementById('memory-meter').dataset.mood") == "warn"
    for name in NAMES[5:9]:
        transport.island.heartbeat(samples.heartbeat(name, link="the Redis does not answer"))
    until(lambda: "4 islands" in page.text("#problem-list"), "one problem for all of them")
    assert page.text("#problem-list details").startswith("4 islandsisland-5, island-6")
    assert page.run("return document.querySelector('main').children[1].id") == "problems"
    page.open(f"{address}/events", charts=0)
    until(lambda: page.is_shown("#banner"), "other tabs show the worst")
    assert "[island.link]" in page.text("#banner")


WIDER = """return [...document.querySelectorAll('main *, header *')].filter(place => place.checkVisibility()
    && !place.closest('svg, .js-plotly-plot') && place.getBoundingClientRect().right > innerWidth + 0.5)
    .map(place => place.className + ' ' + place.textContent.slice(0, 40))"""
CUT = """return [...document.querySelectorAll('main h2, thead th, .tile .big, .num small')]
    .filter(place => place.checkVisibility() && place.scrollWidth > place.clientWidth + 1 && place.clientWidth)
    .map(place => place.textContent)"""


def test_everything_fits_on_each_screen_and_is_readable_in_both_themes(page: Page, address: str) -> None:
    for pixels, theme in ((390, "light"), (390, "dark"), (768, "light"), (1400, "light"), (1400, "dark")):
        page.width(pixels)
        for tab, charts, texts in (
            ("", 2, 30), ("/islands", 1, 100), ("/sync", 2, 20), ("/events", 0, 20), ("/settings", 0, 60),
        ):  # fmt: skip
            page.open(f"{address}{tab}?theme={theme}", charts)
            page.until(lambda: page.text("#run") == "sample", "the page is filled")
            assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [pixels, pixels], tab
            assert page.run(WIDER) == [], (tab, pixels)
            assert page.run(CUT) == [], (tab, pixels)
            ratios = page.run(RATIOS)
            assert len(ratios) > texts, tab
            assert [found for found in ratios if found[0] < 4.5] == []
            if pixels != 768:
                assert violations(page) == [], (tab, pixels, theme)


def violations(page: Page) -> list[tuple[str, str]]:
    """Return what axe finds wrong with the page for people with disabilities: the rule and the first place.

    `RATIOS` measures contrast, because axe does not know the colours that the style mixes.
    """
    axe = pytest.importorskip("axe_selenium_python").Axe(page.driver)
    axe.inject()
    found = axe.run(options="{rules: {'color-contrast': {enabled: false}}}")["violations"]
    # Plotly measures texts in an element off the screen.
    return [(each["id"], str(each["nodes"])[:200]) for each in found if "js-plotly-tester" not in str(each["nodes"])]


def test_the_page_survives_a_restart_of_its_server(page: Page, transport: MemoryTransport, until: Until) -> None:
    with serving(Boards(Watcher(transport)), "127.0.0.1", 0) as first:
        page.open(f"{first}/runs/sample")
        port = int(first.rpartition(":")[2])
    until(lambda: "does not answer" in page.text("#banner"), "the page says that it hears nothing")
    close_round(transport, 41)
    with serving(Boards(Watcher(transport)), "127.0.0.1", port):
        until(lambda: page.text("#step-sub").startswith("round 41"), "the page goes on")
        until(lambda: not page.is_shown("#banner"), "all is well again")


def test_a_phone_shows_what_to_do_and_no_speed_while_redis_does_not_answer(
    page: Page, address: str, until: Until, transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(count: int) -> NoReturn:
        raise UnreachableError("Redis does not answer", "Is it running?")

    page.width(390)
    page.open(address)
    assert "/s" in page.text("#tokens-sub")
    monkeypatch.setattr(transport.reader, "tape", away)
    until(lambda: page.text("#state") == "no answer", "the page says so")
    assert page.is_shown("#banner .remedy") and page.text("#banner").endswith("[broker.unreachable]")
    assert "/s" not in page.text("#tokens-sub") and page.text("#learn-sub").startswith("As of ")
    page.driver.get(f"{address}/islands")
    until(lambda: page.text("#islands tr:first-child td:last-child") == "–", "the time of the last sign of life to go")
    colours = (
        "return ['#islands .pill', '#islands td.num'].map(at => getComputedStyle(document.querySelector(at)).color)"
    )
    assert len(set(page.run(colours))) == 1, "no old state is green"


def test_a_report_is_one_file_that_needs_no_network(
    page: Page, until: Until, transport: MemoryTransport, tmp_path: Path
) -> None:
    transport.reader.note(Note(1.8e9, "</script><script>window.evil = 1</script>", "joined", "<!-- and so on"))
    found = of_watch(Watcher(transport))
    path = tmp_path / "report.html"
    path.write_text(html(found, chart_library().read_text(encoding="utf-8")), encoding="utf-8")
    page.open(path.as_uri())
    assert page.text("#bits") == "2.1250"
    assert page.line("chart-islands")[0] == [*range(1, 41), 40]  # The last point is the present.
    assert "</script>" in page.text("#events")
    assert "synchronised 20 times" in page.text("#about")
    page.driver.get(f"{path.as_uri()}#settings")
    until(lambda: page.is_shown("#settings-rows"), "the tab is in the address")
    assert page.run("return window.evil === undefined")
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.complaints() == []
