"""Signatures, canonical bytes and stamps, without a server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError
from archipelago.broker.presence import Presence
from archipelago.broker.redis.events import StampOrder
from archipelago.broker.signing import (
    MERGER,
    SIGNATURE,
    HeartbeatOrder,
    Kind,
    SignatureError,
    Signing,
    Stamps,
    canonical,
    generate,
    public_key,
    stamp_of,
)
from archipelago.broker.wire import digest, is_digest
from tests.failing import failing
from tests.samples import heartbeat
from tests.tiers import examples

OSLO, OSLO_PUBLIC = generate()
ROME, ROME_PUBLIC = generate()
RUN_KEY, RUN_PUBLIC = generate()
KEYS = {"oslo": OSLO_PUBLIC, "rome": ROME_PUBLIC}
FIELDS = {"island": "oslo", "round": "7", "loss": "1.5"}
Raw = dict[bytes, bytes]
Fields = st.dictionaries(st.binary(max_size=6), st.binary(max_size=6), max_size=4)


def signing(name: str = "oslo", private: bytes | None = OSLO, run: str = "demo") -> Signing:
    return Signing(run, name, private, RUN_PUBLIC, KEYS.get)


def stored(fields: Mapping[str, str], **more: bytes) -> Raw:
    """The fields as a server returns them."""
    return {k.encode(): v.encode() for k, v in fields.items()} | {k.encode(): v for k, v in more.items()}


def test_a_signed_message_is_accepted_and_carries_its_fields() -> None:
    raw = stored(signing().signed("contribution", FIELDS, payload=b"gradient"), payload=b"gradient", chunks=b"3")
    signing("rome", ROME).verify("contribution", "oslo", raw)
    assert is_digest(raw[b"digest"].decode(), b"gradient")
    assert FIELDS.items() <= {k.decode(): v.decode() for k, v in raw.items()}.items()


def test_a_signature_holds_for_one_kind_sender_place_and_run() -> None:
    raw = stored(signing().signed("contribution", FIELDS))
    others: list[tuple[Kind, str, str, str]] = [
        ("heartbeat", "oslo", "", "demo"),
        ("contribution", "rome", "", "demo"),
        ("contribution", MERGER, "", "demo"),
        ("contribution", "oslo", "1/2", "demo"),
        ("contribution", "oslo", "", "other"),
        ("contribution", "paris", "", "demo"),
    ]
    for kind, sender, about, run in others:
        with failing(SignatureError, "signature.wrong"):
            signing(run=run).verify(kind, sender, raw, about=about)


@settings(max_examples=examples(200))
@given(
    change=st.sampled_from([*FIELDS, "digest", SIGNATURE, "new"]),
    value=st.binary(max_size=130),
)
def test_any_changed_field_is_noticed(change: str, value: bytes) -> None:
    raw = stored(signing().signed("contribution", FIELDS, payload=b"gradient"))
    changed = {**raw, change.encode(): value}
    if changed == raw or (change == SIGNATURE and value.lower() == raw[SIGNATURE.encode()]):
        return
    with pytest.raises(SignatureError):
        signing().verify("contribution", "oslo", changed)


def test_a_missing_field_an_unsigned_message_and_another_payload_are_refused() -> None:
    raw = stored(signing().signed("contribution", FIELDS, payload=b"gradient"))
    for gone in (*FIELDS, "digest"):
        with failing(SignatureError, "signature.wrong"):
            signing().verify("contribution", "oslo", {k: v for k, v in raw.items() if k != gone.encode()})
    with failing(SignatureError, "signature.wrong"):
        signing().verify("contribution", "oslo", stored(FIELDS))
    assert not is_digest(raw[b"digest"].decode(), b"another")
    weak = Signing().signed("contribution", FIELDS, payload=b"gradient")  # anyone can find another payload for it
    with failing(SignatureError, "signature.wrong"):
        signing().verify("contribution", "oslo", stored(signing().signed("contribution", weak)))


@settings(max_examples=examples(200))
@given(one=Fields, other=Fields, head=st.tuples(*[st.sampled_from(["", "a", "ab", "b"])] * 3))
def test_different_messages_have_different_canonical_bytes(one: Raw, other: Raw, head: tuple[str, str, str]) -> None:
    run, sender, about = head
    kinds: tuple[Kind, Kind] = ("tape", "event")
    texts = {
        canonical(r, kind, s, a, fields)
        for r, kind, s, a, fields in itertools.product({run, "a"}, kinds, {sender, "a"}, {about, "a"}, [one, other])
    }
    assert len(texts) == len({run, "a"}) * 2 * len({sender, "a"}) * len({about, "a"}) * (1 + (one != other))


def test_all_mergers_share_one_key_and_may_sign_for_an_island() -> None:
    merger = signing(MERGER, RUN_KEY)
    signing().verify("tape", MERGER, stored(merger.signed("tape", FIELDS)))
    again = stored(merger.signed("contribution", FIELDS, payload=b"gradient", sender="oslo"))
    signing("rome", ROME).verify("contribution", "oslo", again)
    with failing(SignatureError, "signature.wrong"):
        signing().verify("contribution", "rome", again)
    forged = stored(signing("rome", ROME).signed("contribution", {**FIELDS, "signer": MERGER}))
    with failing(SignatureError, "signature.wrong"):
        signing().verify("contribution", "oslo", forged)


def test_keys_and_signatures_are_reproducible() -> None:
    assert public_key(OSLO) == OSLO_PUBLIC
    assert signing().signed("event", FIELDS) == signing().signed("event", FIELDS)
    with failing(ConfigError, "signature.no-key"):
        signing("viewer", None).signed("heartbeat", FIELDS)


def test_without_signing_everything_passes() -> None:
    off = Signing()
    assert off.signed("contribution", FIELDS, payload=b"x", sender="oslo") == {**FIELDS, "digest": digest(b"x")}
    assert off.signed("contribution", {"digest": "announced"}, payload=b"x") == {"digest": "announced"}
    off.verify("contribution", "oslo", stored(FIELDS))


# -- stamps --------------------------------------------------------------------------------------------------------


def test_stamps_grow_although_the_clock_goes_back() -> None:
    times = iter([100.0, 50.0, 200.0])
    stamps = Stamps(lambda: next(times))
    found = [stamp_of({b"stamp": stamps.next(3).encode()}) for _ in range(3)]
    assert found == sorted(set(found))
    assert found[2] == (3, 200_000_000)
    for text in (b"", b"1", b"-1-2", b"1-2-3", b"\xff-1", b"1" * 40 + b"-1"):
        with failing(SignatureError, "signature.wrong"):
            pytest.fail(f"{text!r} was read as {stamp_of({b'stamp': text})}")


def test_a_replayed_event_is_not_accepted_from_any_position() -> None:
    order = StampOrder()
    order.stamps = {"5-0": (1, 10)}
    order.accept("6-0", (1, 11), after="5-0")
    order.accept("7-0", (2, 3), after="6-0")
    for stamp in [(2, 3), (1, 12), (1, 11)]:
        with failing(SignatureError, "signature.replayed"):
            order.accept("8-0", stamp, after="7-0")
    order.accept("6-0", (1, 11), after="5-0")  # the reader went back, because it could not handle the event


def test_an_old_snapshot_is_accepted_only_after_a_resume() -> None:
    order = StampOrder()
    order.accept("0", (1, 5))
    order.accept("0", (1, 5))
    order.accept("1", (1, 2))
    with failing(SignatureError, "signature.replayed"):
        order.accept("0", (1, 4))
    order.stamps.clear()
    order.accept("0", (1, 4))


def test_a_repeated_heartbeat_grows_old_although_its_key_is_refreshed() -> None:
    now = 0.0
    order = HeartbeatOrder(lambda: now)
    beat = heartbeat("oslo")
    assert order.accept(Presence(beat, 1.0), (0, 5)).age_seconds == 1.0
    now = 30.0
    assert order.accept(Presence(beat, 1.0), (0, 5)).age_seconds == 30.0
    assert order.accept(Presence(beat, 1.0), (0, 6)).age_seconds == 1.0
    with failing(SignatureError, "signature.replayed"):
        order.accept(Presence(beat, 1.0), (0, 5))
    now = 32.0
    known = order.newest("oslo")
    assert known is not None
    assert known.age_seconds == 3.0
    assert order.newest("rome") is None
