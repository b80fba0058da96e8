"""One outer synchronisation of a whole model between two islands, publish to adopted, against torchft's over Gloo.

Islands, merger and Redis are the real ones, each a process; only inner steps are stood in for, by a nap and a random
walk. Both systems take turns in the same run, so that the machine's other work weighs on both. The torchft side lives
in an environment of its own (`ops/bench_torchft.py` says how to make it); without one the rows say so.

The same once more with one island, and one replica, behind a proxy that lets through THIN_MBIT each way: ours trains on
while it syncs, so the row says which rounds have both islands in them, and what that costs in inner steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Snapshot
from archipelago.broker.process import keep_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest, pack
from archipelago.islands.data.batches import Batches
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.link import Link
from archipelago.islands.worker import Island
from archipelago.merger.service import Merger, serve
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import Child, child
from archipelago.ops.chaos.proxy import LOOPBACK, Proxy
from archipelago.ops.launch import parent_death
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.launch.supervisor import thread_environment
from archipelago.ops.settings import say as terminal_say

Say = Callable[[str], None]

TORCHFT_PYTHON = "ARCHIPELAGO_TORCHFT_PYTHON"
ISLANDS = ("near", "thin")
"""the second one is behind the proxy, where there is one"""
PARAMETERS = 10_000_000
TENSORS, COLUMNS = 12, 1000
"""of one shape: two tensors a fragment"""
FRAGMENTS = 6
WIRE = WireConfig(up="int4", thin="", down="int4")
AT_ONCE = SyncConfig(interval=1, fragments=FRAGMENTS, window=FRAGMENTS, quorum=len(ISLANDS))
"""an inner step, and all fragments are owed: a sync is of the whole model, and waits for both islands"""
TRAINING = SyncConfig(interval=48, fragments=FRAGMENTS)
"""otherwise the defaults, with nobody waiting for anybody"""
STEP_SECONDS = 0.1
THIN_MBIT = 20.0
THIN_SYNCS = 8
THIN_TIMEOUT_SECONDS = 10.0
"""torchft's, in the measurement that this is held against; its own default is a minute"""
WARM_UPS = 2
POLL_SECONDS = 0.001
PATIENCE_SECONDS = 120.0
END_SECONDS = 10.0
TEXT_BYTES = 1 << 20
NOISE = 1e-3


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    parameters: int = PARAMETERS
    rounds: int = 9
    """syncs of which the median counts"""
    thin_syncs: int = THIN_SYNCS
    step_seconds: float = STEP_SECONDS
    mbit: float = THIN_MBIT

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """TENSORS of one shape, of `parameters` elements in all as nearly as whole rows allow."""
        return tuple(Tensor(f"layers.{n:02}", self.shape) for n in range(TENSORS))

    @property
    def shape(self) -> tuple[int, int]:
        """Of each tensor."""
        return (max(1, round(self.parameters / TENSORS / COLUMNS)), COLUMNS)


QUICK = Size(rounds=3, thin_syncs=2)


@dataclass(frozen=True)
class SyncOptions(OutputOptions):
    """One outer synchronisation of 10 M parameters between two islands, against torchft's; also over a thin link."""

    torchft_python: str = ""
    """a Python that has torchft (the head of `ops/bench/torchft.py` says how to make it); default
    $ARCHIPELAGO_TORCHFT_PYTHON"""
    quick: bool = False
    """fewer rounds"""


def main(options: SyncOptions) -> int:
    """Measure, and write what was found."""
    found = sync(terminal_say, options.torchft_python, QUICK if options.quick else None)
    return finish("sync", found, options)


def sync(say: Say, torchft_python: str = "", size: Size | None = None) -> dict[str, Any]:
    """Rows for ours and torchft, on loopback and over a thin link.

    `seconds` are medians over syncs, from the first end's start to the last one's end; `MB` is what one end sends and
    receives in one; `speed_to_torchft` is the median of its seconds over ours, round by round. `committed` counts
    syncs with both ends in them. Without a throttle, ours over a "thin link" takes as long as its inner steps do.
    """
    size = size or Size()
    python = torchft_python or os.environ.get(TORCHFT_PYTHON, "")
    loopback = _on_loopback(size, python, say)
    rows = [*loopback, *_over_thin_link(size, python, loopback[1]["seconds"], say)]
    return {
        "parameters": sum(tensor.size for tensor in size.tensors),
        "fragments": FRAGMENTS,
        "codecs": f"{WIRE.up} up, {WIRE.down} down; torchft float32",
        "step_seconds": size.step_seconds,
        "rows": rows,
    }


# -- on loopback ----------------------------------------------------------------------------------------------------


def _on_loopback(size: Size, python: str, say: Say) -> list[dict[str, Any]]:
    with _ours(AT_ONCE, size) as ours, _torchft(size, python) as theirs:
        _await(lambda: ours.sync().committed, "sync of both islands")  # the merger may not have heard of both at first
        sides: list[Callable[[], _Synced]] = [ours.sync, theirs.sync] if theirs.usable else [ours.sync]
        found: list[list[_Synced]] = [[] for _ in sides]
        for number in range(WARM_UPS + size.rounds):
            for side, syncs in zip(sides, found, strict=True):
                syncs.append(side())
            said = ", ".join(f"{syncs[-1].seconds:.3f} s" for syncs in found)
            say(f"loopback, {'warm-up' if number < WARM_UPS else 'round'}: {said}")
        counted = [syncs[WARM_UPS:] for syncs in found]
        rows = [_row("archipelago", "loopback", counted[0])]
        if theirs.usable:
            rows.append(_row(theirs.name, "loopback", counted[1]))
            ratios = [their.seconds / our.seconds for our, their in zip(*counted, strict=True)]
            rows[0]["speed_to_torchft"] = statistics.median(ratios)
        else:
            rows.append(_missing(theirs, "loopback"))
    return rows


@dataclass(frozen=True)
class _Synced:
    """One sync of the whole model."""

    seconds: float
    committed: bool
    megabytes: float = math.nan
    """over the link of one island or replica, both ways"""


def _row(what: str, link: str, syncs: Sequence[_Synced], note: str = "") -> dict[str, Any]:
    seconds = [s.seconds for s in syncs]
    return {
        "what": what,
        "link": link,
        "seconds": statistics.median(seconds),
        "from": min(seconds),
        "to": max(seconds),
        "committed": f"{sum(s.committed for s in syncs)} of {len(syncs)}",
        "MB": round(statistics.median(s.megabytes for s in syncs), 1),
        "speed_to_torchft": math.nan,
        "steps_to_unthrottled": math.nan,
        "note": note,
    }


def _missing(theirs: Torchft, link: str) -> dict[str, Any]:
    return {
        **_row("torchft", link, [_Synced(math.nan, committed=False)]),
        "committed": "not run",
        "note": theirs.reason,
    }


# -- over a thin link -----------------------------------------------------------------------------------------------


def _over_thin_link(size: Size, python: str, torchft_seconds: float, say: Say) -> list[dict[str, Any]]:
    """`torchft_seconds`: what its sync takes without a throttle."""
    link = f"{size.mbit:g} Mbit/s"
    with _ours(TRAINING, size, proxied=True) as ours:
        rows = [ours.train(say, link)]
    with _torchft(size, python, mbit=size.mbit) as theirs:
        if not theirs.usable:
            return [*rows, _missing(theirs, link)]
        syncs = []
        for _ in range(size.thin_syncs):
            syncs.append(theirs.sync())
            say(f"{link}, torchft: {syncs[-1].seconds:.1f} s, {'' if syncs[-1].committed else 'not '}committed")
    steps_seconds = TRAINING.interval * size.step_seconds
    row = _row(theirs.name, link, syncs, f"its replicas wait meanwhile; timeout {THIN_TIMEOUT_SECONDS:g} s")
    # Not measured but reckoned: it makes no inner step while it syncs, and as many as ours between two syncs.
    row["steps_to_unthrottled"] = (steps_seconds + torchft_seconds) / (steps_seconds + row["seconds"])
    return [*rows, row]


# -- our side -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ours(config: SyncConfig, size: Size, proxied: bool = False) -> Iterator[Ours]:
    """A Redis as `up` starts it, a merger and two islands, each a process; ready to sync."""
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        proxy = held.enter_context(Proxy(LOOPBACK, server.port)) if proxied else None
        made = connect(server.url, "sync")
        held.callback(made.close)
        _make_run(made, config, size)
        urls = [server.url, _through(server.url, proxy.port) if proxy else server.url]
        processes = [Process("the merger", held.enter_context(child(_merge, server.url)))]
        processes += [
            Process(f"the island {name}", held.enter_context(child(_train, url, name, size.step_seconds)))
            for name, url in zip(ISLANDS, urls, strict=True)
        ]
        for process in processes:
            process.hear()
        _await(lambda: len(made.reader.presences()) == len(ISLANDS), "heartbeat of both islands")
        yield Ours(made, proxy, processes[1:], size)


def _through(url: str, port: int) -> str:
    address = urlsplit(url)
    return address._replace(netloc=f":{address.password or ''}@{LOOPBACK}:{port}").geturl()


def _make_run(transport: Transport, config: SyncConfig, size: Size) -> None:
    settings = RunConfig(
        data=DataConfig(sequence_length=64, batch_size=4, shards=8),
        inner=InnerConfig(steps=1 << 30),
        sync=config,
        wire=WIRE,
    )
    tensors = size.tensors
    manifest = Manifest("sync", settings, tensors, balanced(tensors, FRAGMENTS), Corpus("none", "0" * 32, 1 << 20), {})
    random = np.random.default_rng(0)
    firsts = []
    for p, elements in enumerate(manifest.sizes):
        payload = pack(random.standard_normal(elements, np.float32), "float32", 0)
        firsts.append((Snapshot(0, p, 0, 0, "float32", len(payload), digest(payload), merged=""), payload))
    transport.create(manifest, firsts)


class Ours:
    """The run, from outside: what it is told, and what Redis says of it."""

    def __init__(self, transport: Transport, proxy: Proxy | None, islands: Sequence[Process], size: Size) -> None:
        self.transport, self.proxy, self.islands, self.size = transport, proxy, islands, size

    def sync(self) -> _Synced:
        """Both islands move all parameters; then, from the first one's publishing to the last one's adopting."""
        _ask(self.islands, "advance")
        ends = _ask(self.islands, "sync")
        seconds = max(end.at for end in ends) - min(end.began for end in ends)
        return _Synced(seconds, self._both_in_all(), ends[-1].bytes / 1e6)

    def _both_in_all(self) -> bool:
        """Whether all islands are in each of the newest rounds of all fragments."""
        return all(len(entry.members) == len(ISLANDS) for entry in self.transport.reader.tape(FRAGMENTS))

    def train(self, say: Say, link: str) -> dict[str, Any]:
        """Both train, the second one first without and then with a throttle, for so many syncs of all fragments."""
        assert self.proxy is not None  # noqa: S101
        for island in self.islands:
            island.tell("train")
        self._next_sync()  # they find their pace
        free, pace = self._syncs(max(1, self.size.thin_syncs // 4))
        say(f"unthrottled: {pace:.2f} inner steps a second, {free[0].seconds:.2f} s a sync")
        self.proxy.set_rates(self.size.mbit, self.size.mbit)
        thin, thin_pace = self._syncs(self.size.thin_syncs)
        say(f"{link}: {thin_pace:.2f} inner steps a second, {thin[0].seconds:.2f} s a sync")
        self.proxy.set_rates(math.inf, math.inf)
        _ask(self.islands, "stop")
        usual = statistics.median(s.seconds for s in free)
        note = f"{usual:.2f} s unthrottled, of {TRAINING.interval * self.size.step_seconds:.2f} s of inner steps"
        return {**_row("archipelago", link, thin, note), "steps_to_unthrottled": thin_pace / pace}

    def _syncs(self, count: int) -> tuple[list[_Synced], float]:
        """So many syncs one after the other, and the inner steps a second of the second island meanwhile."""
        (before,) = _ask(self.islands[1:], "count")
        syncs = [self._next_sync() for _ in range(count)]
        (after,) = _ask(self.islands[1:], "count")
        return syncs, (after.steps - before.steps) / (after.at - before.at)

    def _next_sync(self) -> _Synced:
        """Waits until each fragment has had one more round."""
        (before,) = _ask(self.islands[1:], "count")
        goal, began = self._round() + FRAGMENTS, time.monotonic()
        _await(lambda: self._round() >= goal, "sync", 10 * POLL_SECONDS)
        seconds, committed = time.monotonic() - began, self._both_in_all()
        (after,) = _ask(self.islands[1:], "count")
        return _Synced(seconds, committed, (after.bytes - before.bytes) / 1e6)

    def _round(self) -> int:
        """The last one that closed."""
        newest = self.transport.reader.tape(1)
        return newest[-1].round if newest else 0


@dataclass(frozen=True)
class _Counts:
    """What an island says of itself."""

    began: float
    at: float
    steps: int
    bytes: int
    """up and down, of the last sync or of all since the beginning"""


def _merge(pipe: Connection, url: str) -> None:
    """The merger's process: serves until it is killed."""
    _share_the_cores()
    keep_freed_memory()  # as the real one does
    merger = Merger(connect(url, "sync"))
    pipe.send("ready")
    serve(merger, lambda: False)


def _train(pipe: Connection, url: str, name: str, step_seconds: float) -> None:
    """An island's process, which does what it is told."""
    _share_the_cores()
    transport = connect(url, "sync")
    manifest = transport.reader.manifest()
    link = Link(transport, manifest, f"{name}/bench")
    batches = Batches(np.zeros(TEXT_BYTES, np.uint8), manifest.config, link.lease)
    steps = stand_in(manifest, sum(name.encode()), 0.0 if manifest.config.sync == AT_ONCE else step_seconds)
    island = Island(name, manifest, steps, batches, link, link.join(), incarnation="bench")
    link.start()
    island.warm_up()
    island.beat("training")
    pipe.send("ready")
    training = False
    while True:
        if training and not pipe.poll():
            island.boundary()
            island.advance()
            continue
        match pipe.recv():
            case "advance":
                island.advance()
                jax.block_until_ready(island.inner.params)  # type: ignore[no-untyped-call]
                pipe.send(_counts(island))
            case "sync":
                pipe.send(_synced(island))
            case "train":
                training = True
            case "stop":
                training = False
                pipe.send(_counts(island))
            case _:
                pipe.send(_counts(island))


def _await(holds: Callable[[], bool], what: str, poll_seconds: float = POLL_SECONDS) -> None:
    began = time.monotonic()
    while not holds():
        if time.monotonic() > began + PATIENCE_SECONDS:
            raise BrokerError(f"no {what} for {PATIENCE_SECONDS:g} s", "Look whether the machine is very busy.")
        time.sleep(poll_seconds)


def _share_the_cores() -> None:
    """As the launcher has it for workers of one machine; before JAX looks at its devices."""
    os.environ |= thread_environment(1 + len(ISLANDS))


def _counts(island: Island) -> _Counts:
    now = time.monotonic()
    return _Counts(now, now, island.totals.steps, island.link.bytes_up + island.link.bytes_down)


def _synced(island: Island) -> _Counts:
    """Publishes all fragments, and passes step boundaries until the merged version of each is adopted."""
    goal = [count.version + 1 for count in island.ledger.counts]
    before = _counts(island)

    def adopted() -> bool:
        island.boundary()
        return all(count.version >= version for count, version in zip(island.ledger.counts, goal, strict=True))

    _await(adopted, "merged version of all fragments")
    jax.block_until_ready((island.inner.params, island.replica.references))  # type: ignore[no-untyped-call]
    after = _counts(island)
    return _Counts(before.at, after.at, after.steps, after.bytes - before.bytes)


def stand_in(
    manifest: Manifest, seed: int, step_seconds: float
) -> Callable[[InnerState, jax.Array, jax.Array], tuple[InnerState, jax.Array]]:
    """Inner steps that take `step_seconds` each: a random walk, whose outer gradients no compression makes small."""
    random = np.random.default_rng(seed)
    noise = {t.name: jnp.asarray(random.standard_normal(t.shape, np.float32) * NOISE) for t in manifest.tensors}
    walked = jax.jit(lambda params: jax.tree.map(jnp.add, params, noise), donate_argnums=0)

    def steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
        until = time.monotonic() + step_seconds * tokens_nxBxT1.shape[0]
        params = walked(state.params)
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, until - time.monotonic()))
        return state._replace(params=params), jnp.full(tokens_nxBxT1.shape[0], 2.0, jnp.float32)

    return steps


# -- processes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process that answers."""

    who: str
    child: Child

    def tell(self, command: str) -> None:
        """Sends it a command."""
        self.child.pipe.send(command)

    def hear(self) -> Any:
        """Its answer. Raises BrokerError where none comes."""
        answer = self.child.says(2 * PATIENCE_SECONDS)
        if answer is None:
            raise BrokerError(f"{self.who} hangs", "See what it wrote above, and run the bench again.")
        return answer


def _ask(processes: Sequence[Process], command: str) -> list[_Counts]:
    """What all of them answer to a command that they get at once."""
    for process in processes:
        process.tell(command)
    return [process.hear() for process in processes]


# -- torchft's side -------------------------------------------------------------------------------------------------


class Torchft:
    """Two replicas and a lighthouse in another Python environment; `reason` says why there are none."""

    def __init__(self, name: str, reason: str, process: subprocess.Popen[str] | None) -> None:
        self.name, self.reason, self._process = name, reason, process

    @property
    def usable(self) -> bool:
        """Whether it can sync."""
        return not self.reason

    def sync(self) -> _Synced:
        """One outer synchronisation of all parameters. Raises BrokerError where it ends instead."""
        assert self._process is not None  # noqa: S101
        found = _said(self._process, "\n")
        if "seconds" not in found:
            raise BrokerError(f"torchft ended: {found['error']}", "Leave --torchft-python out to do without it.")
        size = found["bytes_up"] + found["bytes_down"]
        return _Synced(found["seconds"], found["committed"], size / 1e6 if size else math.nan)


@contextlib.contextmanager
def _torchft(size: Size, python: str, mbit: float = 0.0) -> Iterator[Torchft]:
    """As many tensors of the same shapes, by the Python of that path."""
    if not python:
        yield Torchft("torchft", f"no environment: give --torchft-python, or ${TORCHFT_PYTHON}", None)
        return
    script = Path(__file__).with_name("torchft.py")
    shape = [str(length) for length in size.shape]
    arguments = ["--tensors", str(TENSORS), "--shape", *shape, "--mbit", str(mbit)]
    arguments += ["--timeout-seconds", str(THIN_TIMEOUT_SECONDS if mbit else PATIENCE_SECONDS)]
    # -P: the folder of the script has modules of ours, which are not to be found by their bare names.
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                parent_death.command([python, "-P", str(script), *arguments]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        except OSError as error:
            yield Torchft("torchft", f"{python} cannot be run: {error.strerror}", None)
            return
        try:
            found = _said(process, "")
            if "error" in found:
                log.seek(0)
                last = (log.read().strip().splitlines() or [""])[-1]
                found["error"] += f" ({last:.200})" if last else ""
            yield Torchft(f"torchft {found.get('torchft', '')}".strip(), found.get("error", ""), process)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """It ends with its standard input, and its replicas with it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=END_SECONDS)
    process.kill()
    process.wait()


def _said(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    """Its next answer, after `line` was said to it; with `error` where it has ended."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    answer = process.stdout.readline()
    try:
        found = json.loads(answer)
    except ValueError:
        return {"error": f"it ended with status {process.wait()}"}
    return found if isinstance(found, dict) else {"error": f"it said {answer:.80}"}
