"""The attacks that once harmed a run, each as a function of an attacker and its victims.

Each does its harm with raw commands, and then asserts that the run goes on. The numbers are those of the table in
docs/guide/security.md. `scale` is 1 for a full flood.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from archipelago.broker.messages import Call, Marker, Resume, Snapshot, TapeEntry, to_fields
from archipelago.broker.redis.chunks import CHUNKS, NAME
from tests.conftest import Until
from tests.hostile.attacker import Attacker
from tests.hostile.victims import Standing, Victims, assert_unharmed, standing

#: The largest share of a round that one island may have, as a multiple of the others' mean.
SHARE_CAP = 2.0
LONG_NAME = 64
TTL_OF_AGES_MS = 10**12
WRONG_DIGEST = "0" * 32


@dataclass
class Scene:
    """An attacker, its victims, and what the run had reached before the attack."""

    attacker: Attacker
    victims: Victims
    until: Until
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.before: Standing = standing(self.victims)

    def goes_on(self) -> Standing:
        """Assert that the run goes on."""
        return assert_unharmed(self.victims, self.before, self.until)

    def restarts(self, meanwhile: Callable[[], object] = lambda: None) -> Standing:
        """Assert that the run goes on, and with another merger too. `meanwhile` happens while there is none."""
        self.goes_on()
        self.before = standing(self.victims)
        self.victims.stop_merger()
        meanwhile()
        self.victims.begin_merger()
        return self.goes_on()

    def tape(self) -> list[TapeEntry]:
        """Return the rounds that have closed since the attack."""
        tape = self.victims.transport.reader.tape(1 << 12)
        return [entry for entry in tape if entry.round > self.before.closed]

    def count(self, full: int) -> int:
        """Return the size of a flood."""
        return max(1, int(full * self.scale))


Attack = Callable[[Scene], None]


def a_far_step(scene: Scene) -> None:
    """1. A contribution claims the step after the run's end."""
    scene.attacker.join()
    scene.attacker.send(global_step=1_000_000)
    scene.goes_on()


def the_farthest_step(scene: Scene) -> None:
    """1. A contribution claims a step that does not fit into 32 bits."""
    scene.attacker.join()
    scene.attacker.send(global_step=1 << 62)
    scene.goes_on()


def refused_tokens(scene: Scene) -> None:
    """2. Refused entries of 2^53 tokens add up to more than a counter may hold."""
    claims: dict[str, Any] = {"tokens": 1 << 53, "steps": 1 << 40, "digest": WRONG_DIGEST}
    scene.attacker.push_all(scene.attacker.contributions(520, **claims))
    scene.restarts()


def a_pointer_to_the_snapshot(scene: Scene) -> None:
    """3. An entry points at the chunks of the run's own snapshot."""
    attacker = scene.attacker
    for fragment in range(len(attacker.manifest.fragments)):
        stored = attacker.redis.hgetall(attacker.keys.fragment(fragment))
        if NAME.encode() in stored:
            pointer = {CHUNKS: stored[CHUNKS.encode()], NAME: stored[NAME.encode()]}
            attacker.push({**attacker.contribution()[0], **pointer})
            attacker.push({**attacker.contribution(digest=WRONG_DIGEST)[0], **pointer})
            attacker.push({"island": attacker.name, **pointer})
    scene.goes_on()
    for fragment in range(len(attacker.manifest.fragments)):
        scene.victims.transport.reader.fragment(fragment)
    scene.restarts()


def many_names(scene: Scene) -> None:
    """4. Contributions of many islands with long names in one round."""
    attacker = scene.attacker
    payload = {p: attacker.payload(p) for p in range(len(attacker.manifest.fragments))}
    for _ in range(scene.count(500)):
        name = secrets.token_hex(LONG_NAME // 2)
        number = attacker.closed + 1
        attacker.redis.sadd(attacker.keys.islands, name)
        attacker.send(
            island=name, incarnation=name, stream=name, payload=payload[attacker.manifest.fragment_of(number)]
        )
    scene.restarts()


def another_name_in_my_stream(scene: Scene) -> None:
    """5. Refused entries use an honest island's name and next sequence numbers."""
    attacker, victim = scene.attacker, scene.victims.islands[0]
    incarnation = _incarnation(scene, victim)
    for attacker.sequence in range(0, 2000, 10):
        fields, _ = attacker.contribution(island=victim, incarnation=incarnation, digest=WRONG_DIGEST)
        attacker.push(fields, b"bytes")
    scene.goes_on()


def a_heavy_claim(scene: Scene) -> None:
    """6. A contribution claims so many tokens that it would be the whole round."""
    attacker = scene.attacker
    attacker.join()
    each = attacker.manifest.config.tokens_per_step
    for tokens, steps in ((1 << 53, 1 << 40), (64 * each, 1), (64 * each * 1000, 1000), (each * 10**6, 10**6)):
        attacker.beat()
        attacker.send(tokens=tokens, steps=steps, global_step=steps)
        scene.goes_on()
    for entry in scene.tape():
        of_attacker = sum(m.weight for m in entry.members if m.island == attacker.name)
        others = {m.island for m in entry.members} - {attacker.name}
        if others:
            assert of_attacker <= SHARE_CAP / (SHARE_CAP + len(others)) + 1e-6, entry


def a_far_place(scene: Scene) -> None:
    """7. A contribution claims to have read a shard a hundred million times."""
    scene.attacker.join()
    for shard in range(4):
        scene.attacker.send(data=f"{shard}:99999999:end")
    scene.goes_on()


def a_tiny_step_time(scene: Scene) -> None:
    """8. A heartbeat and a contribution in an honest island's name claim steps of no time."""
    victim = scene.victims.islands[0]
    for _ in range(5):
        scene.attacker.beat(victim, step_seconds=1e-300)
        scene.attacker.send(island=victim, step_seconds=1e-300)
        scene.attacker.send(step_seconds=1e-300)
    scene.goes_on()


def names_without_islands(scene: Scene) -> None:
    """4. Thousands of names in the set of islands, none of which sends anything."""
    attacker = scene.attacker
    for start in range(0, scene.count(20_000), 1000):
        attacker.redis.sadd(attacker.keys.islands, *(f"{n:05}-nobody" for n in range(start, start + 1000)))
    scene.restarts()


def eternal_heartbeats(scene: Scene) -> None:
    """8. A thousand islands write one heartbeat that never expires."""
    attacker = scene.attacker
    for number in range(scene.count(1000)):
        attacker.redis.sadd(attacker.keys.islands, f"ghost-{number}")
        attacker.beat(f"ghost-{number}", TTL_OF_AGES_MS)
    scene.goes_on()


def a_flood(scene: Scene) -> None:
    """9. A hundred thousand tiny entries in a few seconds."""
    scene.attacker.push_all(({"x": "1"}, None) for _ in range(scene.count(100_000)))
    scene.goes_on()


def a_valid_flood(scene: Scene) -> None:
    """9. The same with entries whose headers can be read."""
    scene.attacker.push_all(scene.attacker.contributions(scene.count(20_000), digest=WRONG_DIGEST))
    scene.goes_on()


def damaged_keys(scene: Scene) -> None:
    """10. Keys that are lost or hold something else, while a merger serves and before the next one starts."""
    redis, keys = scene.attacker.redis, scene.attacker.keys
    victim = scene.victims.islands[0]
    redis.delete(keys.island(victim))
    redis.set(keys.island(victim), "a string")
    redis.xadd(keys.tape, {"garbage": "1"})
    redis.xadd(keys.evaluations, {"garbage": "1"})
    scene.restarts()
    scene.restarts(lambda: redis.delete(keys.books))
    scene.restarts(lambda: redis.hset(keys.books, mapping={"merged": "many", "kept": "-4"}))


def damaged_state(scene: Scene) -> None:
    """10. The merger's own state is not text."""
    scene.restarts(lambda: scene.attacker.redis.set(scene.attacker.keys.state, b"\xff\xfe"))


def a_lost_epoch(scene: Scene) -> None:
    """11. The key of the epoch is deleted. The only merger must go on."""
    scene.attacker.redis.delete(scene.attacker.keys.epoch)
    scene.goes_on()
    scene.attacker.redis.set(scene.attacker.keys.epoch, b"\xff garbage")
    scene.goes_on()


def forged_events(scene: Scene) -> None:
    """13. Events that no merger has written."""
    attacker = scene.attacker
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
    scene.goes_on()


def uncounted_entries(scene: Scene) -> None:
    """14. Bare XADD, which counts nothing as published."""
    scene.attacker.join()
    for _ in range(7):
        scene.attacker.send(tokens=1_000)
    scene.restarts()


def _incarnation(scene: Scene, island: str) -> str:
    reader = scene.victims.transport.reader

    def found() -> str:
        beats = [presence.heartbeat for presence in reader.presences()]
        return next((beat.incarnation for beat in beats if beat.island == island), "")

    scene.until(found, f"a heartbeat of {island}")
    return found()


ATTACKS: dict[str, Attack] = {
    f"{(attack.__doc__ or '').partition('.')[0]}-{attack.__name__}": attack
    for attack in (
        a_far_step,
        the_farthest_step,
        refused_tokens,
        a_pointer_to_the_snapshot,
        many_names,
        names_without_islands,
        another_name_in_my_stream,
        a_heavy_claim,
        a_far_place,
        a_tiny_step_time,
        eternal_heartbeats,
        a_flood,
        a_valid_flood,
        damaged_keys,
        damaged_state,
        a_lost_epoch,
        forged_events,
        uncounted_entries,
    )
}
