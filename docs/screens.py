"""Take pictures of the dashboard in ten states: `python -m docs.screens FOLDER [STATE …]`, from the repository's root.

The runs are made up, in a broker in memory: what islands and a merger would write is written, by a clock that jumps.
A picture is FOLDER/STATE-WIDTH-THEME.png, and FOLDER/STATE-COLUMNS.txt is what `archipelago status` prints.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from archipelago.broker.config import OWN_MODEL, InnerConfig, ModelConfig, RunConfig
from archipelago.broker.manifest import Corpus
from archipelago.broker.memory.transport import MemoryBroker, MemoryReader
from archipelago.broker.messages import Evaluation, Note, TapeEntry
from archipelago.broker.transport import Memory
from archipelago.ops.dashboard.main import serving
from archipelago.ops.dashboard.page_data import Boards
from archipelago.ops.experiments.virtual_time import VirtualClock
from archipelago.ops.watch.reading import Watcher
from archipelago.ops.watch.run_list import RunEntry, entry_of
from archipelago.ops.watch.status import render
from tests import samples

HEIGHTS, THEMES, COLUMNS = {1440: 900, 390: 844}, ("light", "dark"), (60, 80, 140)
ROUNDS, STRIDE, ROUND_SECONDS, TOKENS, FRAGMENTS = 600, 4, 2.0, 8192, 4
NAMES = ("bergen", "lisbon", "oslo", "quito")
#: A script that says whether the page shows its data.
DRAWN = "return document.querySelector('#runs tr') || document.querySelectorAll('[data-drawn], .nothing').length > 1"


class ServerReader(MemoryReader):
    """A reader that also knows what only a server does: how much memory is used. It may hang."""

    hangs = False

    def tape(self, count: int) -> list[TapeEntry]:
        if self.hangs:
            threading.Event().wait()
        return super().tape(count)

    def memory(self) -> Memory:
        return Memory(21_000_000, 256_000_000)


class MadeUpRun:
    """A run of four islands after half of its rounds."""

    def __init__(self, state: str) -> None:
        model = ModelConfig(size=OWN_MODEL) if state == "no-loss" else ModelConfig()
        config = RunConfig(model=model, inner=InnerConfig(steps=ROUNDS * STRIDE))
        self.clock, self.chance = VirtualClock(time.time() - ROUNDS / 2 * ROUND_SECONDS), np.random.default_rng(0)
        self.transport = MemoryBroker(self.clock).connect(state)
        self.transport.reader = self.reader = ServerReader(self.transport._broker, state)
        of = samples.manifest(state, config, width=2000, fragments=FRAGMENTS)
        if model.size == OWN_MODEL:
            of = replace(of, corpus=Corpus("", "0" * 32, 0))
        self.transport.create(of, samples.first_snapshots(of))
        self.islands, self.round, self.rising, self.has_loss = dict.fromkeys(NAMES, 1), 0, 0.0, state != "no-loss"
        self.began: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.epoch = self.transport.merger.acquire("merger-1", 1e9) or 0
        self.note("merger", "served", "epoch 1 begins after round 0")
        for name in NAMES:
            self.note(name, "joined", "on cpu, optimiser state: fresh")
        self.play(ROUNDS // 2)

    def note(self, who: str, kind: str, text: str) -> None:
        self.reader.note(Note(self.clock.now, who, kind, text))

    def loss(self, name: str) -> float:
        """Return the training loss of an island, in nats."""
        return self.curve() + self.chance.normal(0.02 * len(name), 0.03) if self.has_loss else math.nan

    def curve(self) -> float:
        return 1.1 + 2.6 * math.exp(-self.round / 60) - 0.0003 * self.round + self.rising

    def beat(self, state: str = "training", link: str = "ok") -> None:
        for name, every in self.islands.items():
            made = (self.round - self.began.setdefault(name, self.round)) // every
            self.transport.island.heartbeat(
                samples.heartbeat(
                    name, state, host=f"{name}.example", device="NVIDIA L4", link=link, steps=made * STRIDE, sent=made,
                    global_step=self.round * STRIDE, tokens=made * TOKENS, loss=self.loss(name),
                    tokens_per_second=TOKENS / ROUND_SECONDS / every, step_seconds=ROUND_SECONDS / STRIDE * every,
                    staleness=float(every - 1),
                    bytes_up=made * TOKENS * 9, bytes_down=made * TOKENS * 12,
                )
            )  # fmt: skip

    def play(self, rounds: int) -> None:
        """Close rounds, with a heartbeat of each island and an evaluation now and then."""
        for _ in range(rounds):
            self.round += 1
            self.clock.now += ROUND_SECONDS
            self.beat()
            sent = [name for name, every in self.islands.items() if self.round % every == 0]
            ordinary = [samples.member(name, self.islands[name] - 1, FRAGMENTS * TOKENS) for name in sent]
            members = tuple(replace(member, loss=self.loss(member.island)) for member in ordinary)
            before, tokens = self.reader.counters(), FRAGMENTS * TOKENS * len(members)
            counts = {
                "merged": before.merged + len(members),
                "merged_tokens": before.merged_tokens + tokens,
                "bytes_up": before.bytes_up + 9 * tokens,
            }
            state = json.dumps({"covered": self.round})
            commit = samples.commit([], round_number=self.round, counts=counts, state=state)
            tape = replace(
                commit.tape, step=self.round * STRIDE, live=len(self.islands), members=members,
                digest=f"{self.round:032x}", loss=sum(member.loss for member in members) / len(members),
                unix_seconds=self.clock.now, merge_seconds=0.03,
            )  # fmt: skip
            self.transport.merger.commit(self.epoch, replace(commit, tape=tape))
            if self.round % 12 == 0 and self.has_loss:
                bits, seen = (self.curve() + 0.15) / math.log(2), counts["merged_tokens"] // FRAGMENTS
                found = Evaluation(self.round, tape.step, seen, self.clock.now, bits, NAMES[0])
                self.reader.record_evaluation(found)

    def idle(self, seconds: float, link: str = "ok") -> None:
        """Let time pass in which no round closes."""
        self.clock.now += seconds
        self.beat(link=link)


def redis_hung(run: MadeUpRun) -> None:
    run.reader.hangs = True
    run.clock.now += 90.0


def no_merger(run: MadeUpRun) -> None:
    run.transport.merger.release(run.epoch)
    run.idle(90.0, "no merger serves the run")


def dead_and_slow(run: MadeUpRun) -> None:
    run.islands["tunis"] = 6
    run.note("tunis", "joined", "on cpu, optimiser state: peer")
    run.play(30)
    del run.islands["oslo"]
    run.play(40)


def silent(run: MadeUpRun) -> None:
    run.islands |= {f"island-{number:02}": 1 for number in range(60)}
    run.play(24)
    run.islands = dict.fromkeys(NAMES, 1)
    run.play(30)


def paused(run: MadeUpRun) -> None:
    run.reader.steer({"merging": "paused"})
    run.note("merger", "paused", "an operator asked for it")
    run.idle(120.0)


def not_learning(run: MadeUpRun) -> None:
    for _ in range(80):
        run.rising += 0.012
        run.play(1)


def finished(run: MadeUpRun) -> None:
    run.play(ROUNDS // 2)
    run.beat("done")
    run.transport.merger.release(run.epoch)
    run.clock.now += 300.0


#: What happens to the run of each state.
STATES: dict[str, Callable[[MadeUpRun], object]] = {
    "healthy": str, "redis-hung": redis_hung, "no-merger": no_merger, "dead-and-slow": dead_and_slow,
    "silent": silent, "paused": paused, "not-learning": not_learning, "finished": finished, "no-loss": str,
}  # fmt: skip


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), "")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as driver:
        yield driver


def picture(driver: webdriver.Chrome, address: str, width: int) -> bytes:
    """Return a picture of a whole page."""
    metrics = {"width": width, "height": HEIGHTS[width], "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get(address)
    WebDriverWait(driver, 60).until(lambda _: driver.execute_script(DRAWN))
    height = driver.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(found["data"])


def main(folder: Path, states: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs = {state: MadeUpRun(state) for state in STATES if not states or state in states}
    watches = {
        state: Watcher(run.transport, address="redis://10.0.0.4", clock=run.clock, wall=run.clock)
        for state, run in runs.items()
    }
    stopped = RunEntry("last-week", "runs/last-week", "ended", "small", 1_000_000, 900, 3000, 3000, 0, 4, 6e5, False)

    def listed() -> list[RunEntry]:
        return [*(entry_of(run.transport) for run in runs.values() if not run.reader.hangs), stopped]

    boards = Boards(None, listed, watches.__getitem__)
    with serving(boards, "127.0.0.1", 0) as address, browser() as driver:
        for state, run in runs.items():
            if state == "redis-hung":  # after a reading
                WebDriverWait(driver, 60).until(lambda _: boards.of("redis-hung").charts)
            STATES[state](run)
        places = {"list": address} if "list" in (states or ["list"]) else {}
        for state, place in (places | {state: f"{address}/runs/{state}" for state in runs}).items():
            for width, theme in product(HEIGHTS, THEMES):
                found = picture(driver, f"{place}?theme={theme}", width)
                (folder / f"{state}-{width}-{theme}.png").write_bytes(found)
        for state, columns in product((state for state, run in runs.items() if not run.reader.hangs), COLUMNS):
            with (folder / f"{state}-{columns}.txt").open("w", encoding="utf-8") as file:
                Console(file=file, width=columns).print(render(watches[state].read()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
