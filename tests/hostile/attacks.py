"""What a hostile client does: the attacks that once harmed a run, false claims, and damage to what an island may write.

Each attack is a function of the attacker and of dice. It does its harm with raw commands. The harness then asserts that
the run goes on. The numbers are those of the table in docs/guide/security.md.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import redis

from archipelago.broker.messages import Call, Marker, Resume, Snapshot, to_fields
from archipelago.broker.redis.chunks import CHUNKS, NAME, PAYLOAD
from tests.hostile.attacker import Attacker, header

LONG_NAME = 64
#: Contributions with claims of their own that one attack sends.
MESSAGES = 8
TTL_OF_AGES_MS = 10**12
WRONG_DIGEST = "0" * 32
Dice = random.Random
Attack = Callable[[Attacker, Dice], None]

# -- messages with false claims ----------------------------------------------------------------------------------------

#: Numbers at which a bound might break, and texts that are no numbers.
INTEGERS = (
    -5, 0, 1, 2, 7, 50, 255, 1 << 15, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 53) + 1, 1 << 62, (1 << 62) + 1, 1 << 64,
    "", "one", "1e3", "٣",
)  # fmt: skip
FRACTIONS = (
    0.0, -0.0, 1e-320, 1e-300, 1e-9, 0.1, 1.0, 5.5, 1e6, 1e9, 1e12, 1e308, "inf", "-inf", "nan", "", "fast",
)  # fmt: skip
NAMES = ("mallory", "trent", "a" * 64, "?", "", "ada", "bea", "merger", "a/b", "..", "x" * 65, "\N{SNOWMAN}")
TEXTS = ("", "x" * 600, "\x1b[2J", "\N{SNOWMAN}", "a\nb", "nan")
SHARDS = (0, 1, 2, 9, "site/0", "-1", "9999999", "x")
PASSES = (0, 0, 1, 2, 10**8, 10**12)
POSITIONS = (0, 1, 5, 10**6, 10**15, "end")
CLAIMS: Mapping[str, tuple[Any, ...]] = {
    "island": NAMES,
    "incarnation": ("x", "y", "", "a" * 64, "\N{SNOWMAN}"),
    **dict.fromkeys(("sequence", "round", "fragment", "base", "tokens", "steps", "global_step", "bytes"), INTEGERS),
    **dict.fromkeys(("loss", "step_seconds"), FRACTIONS),
    "farewell": (0, 1, "true", "2", ""),
    "codec": ("float32", "int4", "int8", "", "gzip", "x" * 65),
    "digest": (WRONG_DIGEST, "", "g" * 32),
}
BEATS: Mapping[str, tuple[Any, ...]] = {
    "state": ("joining", "training", "leaving", "left", "", "dead"),
    **dict.fromkeys(("pid", "steps", "global_step", "tokens", "backlog", "bytes_up"), INTEGERS),
    **dict.fromkeys(
        ("tokens_per_second", "step_seconds", "loss", "staleness"), FRACTIONS
    ),
    **dict.fromkeys(("host", "link", "optimizer_origin"), TEXTS),
}  # fmt: skip
BODIES: Mapping[str, Callable[[Attacker, int], bytes]] = {
    "zeros": lambda attacker, p: attacker.payload(p),
    "noise": lambda attacker, p: attacker.payload(p, noise=1e-3),
    "large": lambda attacker, p: attacker.payload(p, scale=1e30),
    "nan": lambda attacker, p: attacker.payload(p, scale=float("nan")),
    "garbage": lambda attacker, p: secrets.token_bytes(100),
    "truncated": lambda attacker, p: attacker.payload(p)[:-3],
    "empty": lambda attacker, p: b"",
}


def _false(dice: Dice, table: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    names = dice.sample(sorted(table), dice.randint(0, 5))
    claims: dict[str, Any] = {name: str(dice.choice(table[name])) for name in names}
    if dice.random() < 0.3:
        places = [(dice.choice(SHARDS), dice.choice(PASSES), dice.choice(POSITIONS)) for _ in range(dice.randint(0, 9))]
        claims["data"] = " ".join(":".join(map(str, place)) for place in places)
    return claims


def contributions(attacker: Attacker, dice: Dice) -> None:
    """Send contributions with any claims and any bodies, some of them a few times."""
    for _ in range(MESSAGES):
        body, claims = BODIES[dice.choice(sorted(BODIES))], _false(dice, CLAIMS)
        for _ in range(dice.choice([1, 1, 3])):
            fields, _ = attacker.contribution()
            payload = body(attacker, attacker.manifest.fragment_of(int(fields["round"])))
            attacker.push({**header(fields, payload), **claims}, payload)


def heartbeat(attacker: Attacker, dice: Dice) -> None:
    """Send a heartbeat with any claims."""
    attacker.join()
    attacker.beat(**_false(dice, BEATS))


# -- what once harmed a run --------------------------------------------------------------------------------------------


def a_far_step(attacker: Attacker, dice: Dice) -> None:
    """1. A contribution claims the step after the run's end."""
    attacker.join()
    attacker.send(global_step=1_000_000)


def the_farthest_step(attacker: Attacker, dice: Dice) -> None:
    """1. A contribution claims a step that does not fit into 32 bits."""
    attacker.join()
    attacker.send(global_step=1 << 62)


def refused_tokens(attacker: Attacker, dice: Dice) -> None:
    """2. Refused entries of 2^53 tokens add up to more than a counter may hold."""
    claims: dict[str, Any] = {"tokens": 1 << 53, "steps": 1 << 40, "digest": WRONG_DIGEST}
    attacker.push_all(attacker.contributions(520, **claims))


def a_pointer_to_the_snapshot(attacker: Attacker, dice: Dice) -> None:
    """3. An entry points at the chunks of the run's own snapshot."""
    for fragment in range(len(attacker.manifest.fragments)):
        stored = attacker.redis.hgetall(attacker.keys.fragment(fragment))
        if NAME.encode() in stored:
            pointer = {CHUNKS: stored[CHUNKS.encode()], NAME: stored[NAME.encode()]}
            attacker.push({**attacker.contribution()[0], **pointer})
            attacker.push({**attacker.contribution(digest=WRONG_DIGEST)[0], **pointer})
            attacker.push({"island": attacker.name, **pointer})


def pointers(attacker: Attacker, dice: Dice) -> None:
    """3. Entries point at any chunks, in any spelling."""
    for key in attacker.redis.scan_iter(f"{attacker.keys.tag}:*:0", count=1000):
        name = key.decode().removeprefix(f"{attacker.keys.tag}:").removesuffix(":0")
        for pointed in (name, name.partition(":")[2], f"../{name}"):
            attacker.push({**attacker.contribution(bytes=20_000)[0], CHUNKS: "1", NAME: pointed})


def many_names(attacker: Attacker, dice: Dice) -> None:
    """4. Contributions of many islands with long names in one round."""
    payload = {p: attacker.payload(p) for p in range(len(attacker.manifest.fragments))}
    for _ in range(attacker.count(500)):
        name = secrets.token_hex(LONG_NAME // 2)
        number = attacker.closed + 1
        attacker.redis.sadd(attacker.keys.islands, name)
        attacker.send(
            island=name, incarnation=name, stream=name, payload=payload[attacker.manifest.fragment_of(number)]
        )


def names_without_islands(attacker: Attacker, dice: Dice) -> None:
    """4. Thousands of names in the set of islands, none of which sends anything."""
    attacker.redis.sadd(attacker.keys.islands, *(f"{number:05}-nobody" for number in range(attacker.count(20_000))))


def strange_names(attacker: Attacker, dice: Dice) -> None:
    """4. Names that no island may have."""
    attacker.redis.sadd(attacker.keys.islands, *NAMES, b"\xff", "x" * 1000)


def another_name_in_my_stream(attacker: Attacker, dice: Dice) -> None:
    """5. Refused entries use an honest island's name and next sequence numbers."""
    incarnation = attacker.incarnation_of(attacker.victim)
    for attacker.sequence in range(0, 2000, 10):
        fields, _ = attacker.contribution(island=attacker.victim, incarnation=incarnation, digest=WRONG_DIGEST)
        attacker.push(fields, b"bytes")


def a_heavy_claim(attacker: Attacker, dice: Dice) -> None:
    """6. A contribution claims so many tokens that it would be the whole round."""
    each = attacker.manifest.config.tokens_per_step
    attacker.join()
    claims = [(1 << 53, 1 << 40), (64 * each, 1), (64 * each * 1000, 1000), (each * 10**6, 10**6)]
    for tokens, steps in dice.sample(claims, len(claims)):
        attacker.send(tokens=tokens, steps=steps, global_step=steps)


def a_far_place(attacker: Attacker, dice: Dice) -> None:
    """7. A contribution claims to have read a shard a hundred million times."""
    attacker.join()
    for shard in range(4):
        attacker.send(data=f"{shard}:99999999:0")


def a_dead_reader(attacker: Attacker, dice: Dice) -> None:
    """7. An island that is dead, by its heartbeat, claims to have read shards to their ends."""
    attacker.beat(state="dead")
    for data in ("0:1:0 1:1:0 2:1:0 3:1:0", "0:3:0"):
        attacker.send(data=data, payload=attacker.payload(attacker.manifest.fragment_of(attacker.closed + 1), noise=1))


def a_tiny_step_time(attacker: Attacker, dice: Dice) -> None:
    """8. A heartbeat and a contribution in an honest island's name claim steps of no time."""
    for _ in range(5):
        attacker.beat(attacker.victim, step_seconds=1e-300)
        attacker.send(island=attacker.victim, step_seconds=1e-300)
        attacker.send(step_seconds=1e-300)


def eternal_heartbeats(attacker: Attacker, dice: Dice) -> None:
    """8. A thousand islands write one heartbeat that never expires."""
    for number in range(attacker.count(1000)):
        attacker.redis.sadd(attacker.keys.islands, f"ghost-{number}")
        attacker.beat(f"ghost-{number}", TTL_OF_AGES_MS)


def a_flood(attacker: Attacker, dice: Dice) -> None:
    """9. A hundred thousand tiny entries in a few seconds."""
    attacker.push_all(({"x": "1"}, None) for _ in range(attacker.count(100_000)))


def a_valid_flood(attacker: Attacker, dice: Dice) -> None:
    """9. The same with entries whose headers can be read."""
    attacker.push_all(attacker.contributions(attacker.count(20_000), digest=WRONG_DIGEST))


def damaged_keys(attacker: Attacker, dice: Dice) -> None:
    """10. Keys that are lost or hold something else."""
    client, keys = attacker.redis, attacker.keys
    client.delete(keys.island(attacker.victim))
    client.set(keys.island(attacker.victim), "a string")
    client.xadd(keys.tape, {"garbage": "1"})
    client.xadd(keys.evaluations, {"garbage": "1"})
    client.hset(keys.counters, mapping={"merged": "many", "kept": "-4"})


def lost_counters(attacker: Attacker, dice: Dice) -> None:
    """10. The counters are deleted."""
    attacker.redis.delete(attacker.keys.counters)


def damaged_state(attacker: Attacker, dice: Dice) -> None:
    """10. The merger's own state is not text."""
    attacker.redis.set(attacker.keys.state, b"\xff\xfe")


def a_lost_epoch(attacker: Attacker, dice: Dice) -> None:
    """11. The key of the epoch is deleted or overwritten. The only merger must go on."""
    if dice.random() < 0.5:
        attacker.redis.delete(attacker.keys.epoch)
    else:
        attacker.redis.set(attacker.keys.epoch, b"\xff garbage")


def forged_events(attacker: Attacker, dice: Dice) -> None:
    """13. Events that no merger has written."""
    for event in (
        Snapshot(1 << 62, 4000, 1 << 62, 1 << 62, "float32", 10, WRONG_DIGEST, ""),
        Snapshot(1 << 62, 0, 1 << 62, 1 << 62, "float32", 10, WRONG_DIGEST, ""),
        Call(1 << 62, 4000),
        Resume(1 << 62, 1 << 62),
        Marker(1 << 62, 1 << 62),
    ):
        kind = type(event).__name__.lower()
        fields: dict[Any, Any] = {"kind": kind, **to_fields(event)}
        attacker.redis.xadd(attacker.keys.snapshots, fields)
    attacker.redis.xadd(attacker.keys.snapshots, {"kind": "call", "round": b"\xff"})


def uncounted_entries(attacker: Attacker, dice: Dice) -> None:
    """14. Bare XADD, which counts nothing as published."""
    attacker.join()
    for _ in range(7):
        attacker.send(tokens=1_000)


# -- damage to what an island may write --------------------------------------------------------------------------------


def raw_entries(attacker: Attacker, dice: Dice) -> None:
    every: list[dict[Any, Any]] = [
        {"x": "1"}, {b"\xff": b"\xfe"}, {"island": attacker.name}, {PAYLOAD: b"x" * 100_000},
    ]  # fmt: skip
    for fields in every:
        attacker.push(fields)


def not_a_stream(attacker: Attacker, dice: Dice) -> None:
    attacker.redis.set(attacker.stream("trudy"), "a string")
    attacker.redis.sadd(attacker.keys.islands, "trudy")


def not_a_heartbeat(attacker: Attacker, dice: Dice) -> None:
    attacker.join()
    attacker.redis.set(attacker.keys.island(attacker.name), b"\xff")


def heartbeat_in_pieces(attacker: Attacker, dice: Dice) -> None:
    attacker.redis.delete(attacker.keys.island(attacker.name))
    attacker.redis.hset(attacker.keys.island(attacker.name), mapping={b"\xff": b"\xff", "x" * 1000: "y" * 100_000})


def leases(attacker: Attacker, dice: Dice) -> None:
    shards = (*range(20), 10**9, "../x", "")
    for shard in shards:
        holder = dice.choice([f"{attacker.name}/x", f"{attacker.victim}/{attacker.incarnation_of(attacker.victim)}"])
        attacker.redis.set(attacker.key(f"taken:{shard}"), dice.choice([f"{holder}:0", f"{holder}:1", "x", "\xff"]))


def requests(attacker: Attacker, dice: Dice) -> None:
    attacker.redis.hset(attacker.keys.requests, mapping={f"{attacker.name}/{n}": "" for n in range(50)})
    attacker.redis.hset(attacker.keys.requests, mapping={"": "", "a/b/c": "", "\N{SNOWMAN}": "ada", "ada": "\xff"})


def handovers(attacker: Attacker, dice: Dice) -> None:
    """Answer the requests of others with nonsense."""
    for island in ("ada", "bea", "newcomer"):
        attacker.redis.hset(attacker.keys.handover(f"{island}/x"), mapping={"giver": "", CHUNKS: "1048576", NAME: "x"})


def notes(attacker: Attacker, dice: Dice) -> None:
    for text in ("", "x" * 10_000, "\x1b[2J\x1b[31m", "<script>alert(1)</script>"):
        fields: dict[Any, Any] = {"unix_seconds": "1e12", "who": attacker.name, "kind": "joined", "text": text}
        attacker.redis.xadd(attacker.key(f"notes:{attacker.name}"), fields)


def the_last_entry(attacker: Attacker, dice: Dice) -> None:
    """Let nothing follow the last entry of a stream."""
    island = f"{attacker.name}-last"
    attacker.redis.xadd(attacker.stream(island), {"x": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
    attacker.redis.sadd(attacker.keys.islands, island)


#: Every attack that leaves the log of merged contributions.
ATTACKS: tuple[Attack, ...] = (
    contributions, heartbeat, raw_entries, not_a_stream, not_a_heartbeat, heartbeat_in_pieces, leases,
    requests, handovers, notes, strange_names, pointers, the_last_entry,
    a_far_step, the_farthest_step, refused_tokens, a_pointer_to_the_snapshot, many_names, names_without_islands,
    another_name_in_my_stream, a_heavy_claim, a_far_place, a_dead_reader, a_tiny_step_time, eternal_heartbeats,
    a_flood, a_valid_flood, damaged_keys, lost_counters, damaged_state, a_lost_epoch, forged_events, uncounted_entries,
)  # fmt: skip


def make(attack: Attack, attacker: Attacker, dice: Dice) -> None:
    """Make an attack. A command that the role does not permit changes nothing."""
    try:
        attack(attacker, dice)
    except redis.exceptions.NoPermissionError:
        return
