"""Small valid messages, which tests change as they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from archipelago.broker.codecs import TINY, Vector, codec
from archipelago.broker.commits import Commit, Delivery, Image, entry_name
from archipelago.broker.config import InnerConfig, RunConfig, WireConfig
from archipelago.broker.full_state import PARAMETERS, Compaction, FullState, joined
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.memory.transport import MemoryBroker, MemoryTransport
from archipelago.broker.messages import (
    Contribution,
    Counters,
    Evaluation,
    Handover,
    Refusal,
    RoundMember,
    Snapshot,
    TapeEntry,
    to_fields,
)
from archipelago.broker.presence import Heartbeat
from archipelago.broker.transport import MergerTransport, ReaderTransport
from archipelago.broker.wire import digest, pack, unpack
from archipelago.merger import outer
from archipelago.merger.state import FragmentState
from archipelago.ops.watch.history import RECENT_ROUNDS
from archipelago.ops.watch.reading import Watcher
from archipelago.ops.watch.run_view import RunView

#: A payload that the Redis transports split into three chunks.
LARGE = bytes(range(256)) * 10_000
#: The width of a manifest whose payloads may be as large.
WIDTH = 100_000
REFUSAL = Refusal("a", "x", 0, 1, 0, 100, "it was too old")
#: A connection of any kind to a run.
Connected = TypeVar("Connected", bound=Any)


def manifest(run: str = "sample", config: RunConfig | None = None, width: int = 4, fragments: int = 2) -> Manifest:
    """Return the manifest of a run with four tensors in that many fragments. `width` scales their size."""
    tensors: tuple[Tensor, ...] = (
        Tensor("embedding", (8, width), "embedding"),
        Tensor("layers.0", (4, width)),
        Tensor("layers.1", (width, 3)),
        Tensor("norm", (width,)),
    )
    # These settings are explicit, so that a changed default does not change the tests.
    config = config or RunConfig(inner=InnerConfig(steps=2000), wire=WireConfig(thin="int4", down="float32"))
    # The payloads of `packed` use the float32 codec.
    config = replace(config, sync=replace(config.sync, fragments=fragments), wire=replace(config.wire, up="float32"))
    names = balanced(tensors, fragments)
    return Manifest(run, config, tensors, names, Corpus("text", "0" * 32, 1000), {"jax": "1"})


def first_snapshots(of: Manifest, value: float = 0.0) -> list[tuple[Snapshot, bytes]]:
    """Return version 0 of each fragment. All elements equal `value`."""
    out = []
    for p in of.own_fragments:
        payload = pack(np.full(of.sizes[p], value, np.float32), "float32", 1)
        out.append((Snapshot(0, p, 0, 0, "float32", len(payload), digest(payload), ""), payload))
    return out


def begin(transport: Connected, value: float = 0.0, **changes: Any) -> Connected:
    """Create the run of a connection, and return the connection. `changes` are arguments of `manifest`."""
    of = manifest(transport.run, **changes)
    transport.create(of, first_snapshots(of, value))
    return transport


def contribution(payload: bytes = b"payload", **changes: Any) -> Contribution:
    """Return a contribution of island `a`, incarnation `x`, with sequence 0, round 1 and fragment 0.

    `changes` replaces some of its fields.
    """
    base = Contribution(
        island="a", incarnation="x", sequence=0, round=1, fragment=0, base=0, tokens=100, steps=4, global_step=4,
        loss=2.5, step_seconds=1.0, farewell=False, codec="float32", bytes=len(payload), digest=digest(payload),
    )  # fmt: skip
    return replace(base, **changes)


def packed(values_N: Vector, **changes: Any) -> tuple[Contribution, bytes]:
    """Return a contribution whose payload holds `values_N`, and that payload."""
    payload = pack(values_N, "float32", 1)
    return contribution(payload, **changes), payload


def heartbeat(island: str = "a", state: str = "training", **changes: Any) -> Heartbeat:
    """Return a heartbeat of an island. `changes` replaces some of its fields."""
    base = Heartbeat(
        island=island, incarnation="x", state=state, host="h", pid=1, device="cpu", steps=10, global_step=10,
        tokens=1000, tokens_per_second=100.0, step_seconds=0.1, loss=2.0, staleness=0.0, backlog=0, sent=1, refused=0,
        last_refusal="", bytes_up=10, bytes_down=10, link="ok",
    )  # fmt: skip
    return replace(base, **changes)


def commit(
    entries: list[str], payload: bytes = b"new", round_number: int = 1, own: bytes = b"outer", **changes: Any
) -> Commit:
    """Return the commit of a round of fragment 0 that merges `entries`. Without a payload, it has no full state."""
    version = (round_number + 1) // 2
    member = RoundMember("a", "x", 0, 0, 0, 1.0, 1.0, 100, 4, 2.5)
    tape = TapeEntry(round_number, 0, version, 1, 4, 1.0, 0.1, 0.2, 0.3, 1, 7, 2.5, digest(payload), (member,))
    snapshot = Snapshot(round_number, 0, version, 4, "float32", len(payload), digest(payload), "a")
    counts = {"merged": len(entries), "merged_tokens": 100 * len(entries), "bytes_up": 7 * len(entries)}
    full = Compaction(snapshot, payload, own) if payload else None
    base = Commit(snapshot, full, '{"closed": 1}', tape, entries, counts=counts)
    return replace(base, **changes)


def pending(transport: ReaderTransport) -> tuple[int, int]:
    """Return the number and the tokens of the contributions that wait."""
    found = transport.reader.counters()
    return found.pending, found.pending_tokens


def refuse(transport: MergerTransport, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
    """Refuse entries whose payloads have 7 bytes, in a run that has the counters of its counters."""
    before = transport.reader.counters()
    counts = {
        "refused": before.refused + len(refusals),
        "refused_tokens": before.refused_tokens + sum(refusal.tokens for _, refusal in refusals),
        "bytes_up": before.bytes_up + 7 * len(refusals),
    }
    transport.merger.refuse(epoch, refusals, transport.reader.merger_state(), counts)


def with_payloads(deliveries: Iterable[Delivery]) -> list[Delivery]:
    return [delivery.with_payload() for delivery in deliveries]


def member(island: str, staleness: int = 0, tokens: int = 100) -> RoundMember:
    """Return a member of a round, whose loss is 2."""
    return RoundMember(island, "x", 0, 0, staleness, 0.5, 1.0, tokens, 4, 2.0)


def view_of(transport: ReaderTransport) -> RunView:
    """Return the run as `status` reads it."""
    return Watcher(transport, RECENT_ROUNDS).read().view


def merged_one_of_three(evaluation: Evaluation) -> MemoryTransport:
    """Return a connection to a run with one island, one merged contribution and two pending ones."""
    transport = begin(MemoryBroker(clock=lambda: 100.0).connect("sample"))
    transport.island.heartbeat(heartbeat("a"))
    for sequence in range(3):
        transport.island.publish(contribution(sequence=sequence), b"payload")
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    first, *_ = transport.merger.updates(0.0)
    transport.merger.commit(epoch, commit([first.entry]))
    transport.reader.record_evaluation(evaluation)
    return transport


def forge(transport: Any, sender: str, sent: Contribution, payload: bytes) -> str:
    """Append a contribution to the stream of `sender`, whatever island its header names, and return its entry."""
    if isinstance(transport, MemoryTransport):
        with transport._broker.opened(transport.run) as run:
            return run.add(sent, payload, sender)
    connection = getattr(transport, "administrator", transport).connection
    raw, keys = connection.redis, connection.keys
    raw.sadd(keys.islands, sender)
    return entry_name(sender, raw.xadd(keys.updates(sender), {**to_fields(sent), "payload": payload}).decode())


def handover(payload: bytes = b"moments", **changes: Any) -> Handover:
    """Return the header of inner optimiser state from island `b`, incarnation `y`."""
    return replace(Handover("b", "y", 40, len(payload), digest(payload)), **changes)


def first_states(of: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> list[FullState]:
    """Return the full states of fragments at version 0."""
    return [FullState(snapshot, unpack(payload, of.sizes[snapshot.fragment]), {}) for snapshot, payload in snapshots]


def outer_bits(fragment: FragmentState) -> bytes:
    """Return the exact parameters and the outer optimiser's state of a fragment."""
    return joined(outer.named(fragment.params_N, fragment.outer))


def plain(image: Image | None) -> Any:
    """Return an image that equals others with the same bits."""
    assert image is not None
    return replace(image, fragments=[full.packed(image.manifest.config.wire) for full in image.fragments])  # type: ignore[misc]


def image(of: Manifest, pending: list[tuple[Contribution, bytes]], noise: bytes = b"outer", **changes: Any) -> Image:
    """Return checkpoint 3 of a run or shard that merged its first round and refused one contribution.

    `noise` is a part of that fragment's outer state, which it lacks without any.
    """
    p, closed = of.own_fragments[0], commit([], round_number=of.own_rounds.next(0))
    ones_N, snapshot = np.ones(of.sizes[p], np.float32), replace(closed.snapshot, fragment=p, version=1)
    own: dict[str, Any] = {PARAMETERS: ones_N, "noise": np.frombuffer(noise, np.uint8)} if noise else {}
    base = Image(
        manifest=of,
        number=3,
        fragments=[FullState(snapshot, ones_N, own), *first_states(of, first_snapshots(of))[1:]],
        state=closed.state,
        counters=Counters(9, 900, 2, 200, 1, 100, 5000),
        cursors={"0": (0, 96), "7": (2, 0)},
        tape=[closed.tape],
        evaluations=[Evaluation(1, 4, 100, 1.7e9, 5.0)],
        pending=pending,
    )
    return replace(base, **changes)


def codec_error_bound(name: str, values_N: Vector) -> Vector:
    """Return the largest error of each element that a codec may make, for finite values up to HUGE."""
    magnitude_N = np.abs(values_N)
    if name == "float32":
        return np.zeros_like(values_N)
    if name == "bfloat16":
        return magnitude_N * np.float32(2.0**-8) + np.float32(2.0**-126)
    block = codec(name).block
    padded_N = np.concatenate([magnitude_N, np.zeros(-values_N.size % block, np.float32)])
    tops_N = np.repeat(padded_N.reshape(-1, block).max(axis=1), block)[: values_N.size]
    if name == "top3":  # the magnitude, which a dropped value loses, or 0.61 of the block's largest
        return np.asarray(np.maximum(magnitude_N, tops_N * np.float32(0.61)) + TINY, np.float32)
    steps = {"int8": 127, "int4": 7}[name]  # half a step, and the effect of rounding the scale to bfloat16
    return np.asarray(tops_N * np.float32((0.5 + steps / 256) / steps) + TINY * steps, np.float32)
