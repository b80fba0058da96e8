"""Hostile moves that nobody listed: messages with any claims, and damage to what an island may write.

`hostile_moves` is a hypothesis strategy. `make` turns a move into raw Redis commands.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import redis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from archipelago.broker.redis.chunks import CHUNKS, NAME, PAYLOAD
from tests.hostile.attacker import Attacker, header

#: Numbers at which a bound might break.
EDGES = (0, 1, 2, 7, 255, 1 << 15, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 53) + 1, 1 << 62, (1 << 62) + 1, 1 << 64)
FRACTIONS = (
    0.0,
    -0.0,
    1e-320,
    1e-300,
    1e-9,
    0.1,
    1.0,
    1e6,
    1e9,
    1e12,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)
NAMES = ("mallory", "trent", "a" * 64, "?", "", "ada", "bea", "merger", "a/b", "..", "x" * 65, "\N{SNOWMAN}")


@dataclass(frozen=True)
class Move:
    """One hostile message or damage.

    Attributes:
        kind: A name in `MOVES`.
        claims: The fields that differ from those of an honest message.
        body: What is in place of an honest payload: its name in `BODIES`.
        count: How often it is sent.
    """

    kind: str
    claims: tuple[tuple[str, Any], ...] = ()
    body: str = "zeros"
    count: int = 1


def _integers() -> SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(EDGES), st.integers(-5, 100), st.integers(0, 1 << 62), st.sampled_from(["", "one", "1e3", "٣"])
    )


def _fractions() -> SearchStrategy[Any]:
    return st.one_of(st.sampled_from(FRACTIONS), st.floats(0, 10), st.sampled_from(["", "fast"]))


def _places() -> SearchStrategy[str]:
    place = st.tuples(
        st.one_of(st.integers(0, 9), st.sampled_from(["site/0", "-1", "9999999", "x"])),
        st.sampled_from([0, 0, 1, 2, 10**8, 10**12]),
        st.sampled_from([0, 1, 5, 10**6, 10**15, "end"]),
    )
    return st.lists(place.map(lambda parts: ":".join(map(str, parts))), max_size=40).map(" ".join)


CLAIMS: dict[str, SearchStrategy[Any]] = {
    "island": st.sampled_from(NAMES),
    "incarnation": st.sampled_from(["x", "y", "", "a" * 64, "\N{SNOWMAN}"]),
    "sequence": _integers(),
    "round": _integers(),
    "fragment": _integers(),
    "base": _integers(),
    "tokens": _integers(),
    "steps": _integers(),
    "global_step": _integers(),
    "loss": _fractions(),
    "step_seconds": _fractions(),
    "farewell": st.sampled_from([0, 1, "true", "2", ""]),
    "codec": st.sampled_from(["float32", "int4", "int8", "", "gzip", "x" * 65]),
    "bytes": _integers(),
    "digest": st.sampled_from(["0" * 32, "", "g" * 32]),
    "data": _places(),
}
BEATS: dict[str, SearchStrategy[Any]] = {
    "state": st.sampled_from(["joining", "training", "leaving", "left", "", "dead"]),
    "pid": _integers(),
    "host": st.text(max_size=600),
    "steps": _integers(),
    "global_step": _integers(),
    "tokens": _integers(),
    "tokens_per_second": _fractions(),
    "step_seconds": _fractions(),
    "loss": _fractions(),
    "staleness": _fractions(),
    "backlog": _integers(),
    "bytes_up": _integers(),
    "link": st.text(max_size=600),
    "data": _places(),
    "moments": st.text(max_size=100),
    "uplink_bytes_per_second": _fractions(),
}
BODIES: dict[str, Callable[[Attacker, int], bytes]] = {
    "zeros": lambda attacker, p: attacker.payload(p),
    "noise": lambda attacker, p: attacker.payload(p, noise=1e-3),
    "large": lambda attacker, p: attacker.payload(p, scale=1e30),
    "nan": lambda attacker, p: attacker.payload(p, scale=float("nan")),
    "garbage": lambda attacker, p: secrets.token_bytes(100),
    "truncated": lambda attacker, p: attacker.payload(p)[:-3],
    "empty": lambda attacker, p: b"",
}


def _claims(table: dict[str, SearchStrategy[Any]]) -> SearchStrategy[tuple[tuple[str, Any], ...]]:
    one = st.sampled_from(sorted(table)).flatmap(lambda name: table[name].map(lambda value: (name, value)))
    return st.lists(one, max_size=5, unique_by=lambda claim: claim[0]).map(tuple)


def hostile_moves(kinds: Collection[str] = ()) -> SearchStrategy[list[Move]]:
    """Return a strategy for a few hostile moves of these kinds, by default of all kinds."""
    contribution = st.builds(
        Move, st.just("contribution"), _claims(CLAIMS), st.sampled_from(sorted(BODIES)), st.sampled_from([1, 1, 3, 40])
    )
    beat = st.builds(Move, st.just("heartbeat"), _claims(BEATS))
    other = st.builds(Move, st.sampled_from(sorted(set(kinds or MOVES) - {"contribution", "heartbeat"})))
    return st.lists(st.one_of(contribution, contribution, beat, other), min_size=1, max_size=6)


# -- what each kind does ----------------------------------------------------------------------------------------------


def _contribution(attacker: Attacker, move: Move) -> None:
    claims = dict(move.claims)
    for _ in range(move.count):
        fields, _ = attacker.contribution()
        payload = BODIES[move.body](attacker, attacker.manifest.fragment_of(int(fields["round"])))
        fields = {**header(fields, payload), **{name: str(value) for name, value in claims.items()}}
        attacker.push(fields, payload)


def _heartbeat(attacker: Attacker, move: Move) -> None:
    attacker.join()
    attacker.beat(**dict(move.claims))


def _pointer(attacker: Attacker, move: Move) -> None:
    for key in attacker.redis.scan_iter(f"{attacker.keys.tag}:*:0", count=1000):
        name = key.decode().removeprefix(f"{attacker.keys.tag}:").removesuffix(":0")
        for pointed in (name, name.partition(":")[2], f"../{name}"):
            attacker.push({**attacker.contribution(bytes=20_000)[0], CHUNKS: "1", NAME: pointed})


def _raw(attacker: Attacker, move: Move) -> None:
    every: list[dict[Any, Any]] = [
        {"x": "1"}, {b"\xff": b"\xfe"}, {"island": attacker.name}, {PAYLOAD: b"x" * 100_000},
    ]  # fmt: skip
    for fields in every:
        attacker.push(fields)


def _not_a_stream(attacker: Attacker, move: Move) -> None:
    attacker.redis.set(attacker.stream(), "a string")


def _not_a_heartbeat(attacker: Attacker, move: Move) -> None:
    attacker.join()
    attacker.redis.set(attacker.keys.island(attacker.name), b"\xff")


def _heartbeat_in_pieces(attacker: Attacker, move: Move) -> None:
    attacker.join()
    attacker.redis.hset(attacker.keys.island(attacker.name), mapping={b"\xff": b"\xff", "x" * 1000: "y" * 100_000})


def _actions(attacker: Attacker, move: Move) -> None:
    key = attacker.key(f"actions:{attacker.name}")
    forged: dict[Any, Any] = {"island": "ada", "incarnation": "x", "index": "0", "text": "step " * 1000}
    attacker.redis.xadd(key, {"x": "1"})
    attacker.redis.xadd(key, forged)


def _leases(attacker: Attacker, move: Move) -> None:
    key = attacker.key(f"leases:{attacker.name}")
    attacker.redis.hset(key, mapping={str(shard): f"{attacker.name}/x" for shard in (*range(20), 10**9, "../x", "")})


def _requests(attacker: Attacker, move: Move) -> None:
    attacker.redis.hset(attacker.keys.requests, mapping={f"{attacker.name}/{n}": "" for n in range(50)})
    attacker.redis.hset(attacker.keys.requests, mapping={"": "", "a/b/c": "", "\N{SNOWMAN}": "ada", "ada": "\xff"})


def _notes(attacker: Attacker, move: Move) -> None:
    for text in ("", "x" * 10_000, "\x1b[2J\x1b[31m", "<script>alert(1)</script>"):
        fields: dict[Any, Any] = {"unix_seconds": "1e12", "who": attacker.name, "kind": "joined", "text": text}
        attacker.redis.xadd(attacker.key(f"notes:{attacker.name}"), fields)


def _names(attacker: Attacker, move: Move) -> None:
    attacker.redis.sadd(attacker.keys.islands, *NAMES, b"\xff", "x" * 1000)


def _own_stream(attacker: Attacker, move: Move) -> None:
    """Trim the own stream, with what was merged and what waits, and let nothing follow its last entry."""
    attacker.send()
    attacker.redis.xadd(attacker.stream(), {"x": "1"}, maxlen=0, approximate=False)
    attacker.redis.xadd(attacker.stream("trudy"), {"x": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
    attacker.redis.sadd(attacker.keys.islands, "trudy")


def _restored(attacker: Attacker, move: Move) -> None:
    """Claim that the run was restored from a checkpoint, and take the claims of others."""
    for field in ("number", "round", "by.ada", "by.newcomer"):
        attacker.redis.hsetnx(attacker.keys.restored, field, "-9e99")


def _handovers(attacker: Attacker, move: Move) -> None:
    """Answer the requests of others with nonsense."""
    for island in ("ada", "bea", "newcomer"):
        attacker.redis.hset(attacker.keys.handover(f"{island}/x"), mapping={"giver": "", CHUNKS: "1048576", NAME: "x"})


#: Every move, by its name.
MOVES: dict[str, Callable[[Attacker, Move], None]] = {
    "contribution": _contribution,
    "heartbeat": _heartbeat,
    "pointer": _pointer,
    "raw": _raw,
    "not-a-stream": _not_a_stream,
    "not-a-heartbeat": _not_a_heartbeat,
    "heartbeat-in-pieces": _heartbeat_in_pieces,
    "actions": _actions,
    "leases": _leases,
    "requests": _requests,
    "notes": _notes,
    "names": _names,
    "own-stream": _own_stream,
    "restored": _restored,
    "handovers": _handovers,
}


def make(attacker: Attacker, moves: list[Move]) -> None:
    """Make the moves. A command that the server refuses changes nothing, and the next move follows."""
    for move in moves:
        try:
            MOVES[move.kind](attacker, move)
        except redis.ResponseError:
            continue
