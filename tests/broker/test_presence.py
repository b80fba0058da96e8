"""Who takes part in a run: which islands are live, and whose claim to a name counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.presence import (
    AHEAD_MS,
    LIVE_SECONDS,
    NameClaim,
    Presence,
    newest_claim,
    next_claim,
    parse_name_claim,
)
from tests import samples

CLAIMS = st.builds(NameClaim, st.integers(0, 10**17), st.sampled_from(["old", "new", "other"]))


def test_a_claim_survives_as_text_and_any_other_text_is_none() -> None:
    assert parse_name_claim(str(NameClaim(12, "a-b.c"))) == NameClaim(12, "a-b.c")
    for text in ("", "1", "1 ", " x", "-1 x", "1 x y", "9" * 19 + " x", "1 " + "x" * 65, "١ x"):
        assert parse_name_claim(text) is None, text


@given(st.none() | CLAIMS, st.integers(0, 10**14))
def test_a_new_claim_is_newer_than_the_stored_one(stored: NameClaim | None, now_ms: int) -> None:
    claim = next_claim(stored, "new", now_ms)
    assert claim.incarnation == "new"
    if stored is not None:
        assert newest_claim(claim, stored) == claim
        if stored.generation <= now_ms + AHEAD_MS:
            assert claim.generation > stored.generation


@given(CLAIMS, CLAIMS)
def test_of_two_claims_only_one_counts(one: NameClaim, other: NameClaim) -> None:
    if abs(one.generation - other.generation) <= AHEAD_MS:
        assert newest_claim(one, other) == newest_claim(other, one)


def test_a_lost_or_absurd_claim_does_not_replace_the_holder() -> None:
    own = NameClaim(1000, "new")
    assert newest_claim(own, None) == own
    assert newest_claim(own, NameClaim(999, "old")) == own
    assert newest_claim(own, NameClaim(10**17, "forged")) == own
    assert newest_claim(own, NameClaim(1001, "newer")) == NameClaim(1001, "newer")


def test_which_islands_are_live_and_training() -> None:
    for state, age_seconds, live, training in (
        ("joining", 0.0, True, False),
        ("training", LIVE_SECONDS - 0.1, True, True),
        ("training", LIVE_SECONDS, False, False),
        ("leaving", 0.0, True, False),
        ("left", 0.0, False, False),
        ("dreaming", 0.0, False, False),
    ):
        presence = Presence(samples.heartbeat("a", state), age_seconds)
        assert (presence.is_live, presence.is_training) == (live, training), (state, age_seconds)
