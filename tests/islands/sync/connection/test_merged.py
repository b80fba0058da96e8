"""Which merged contributions an island keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from archipelago.islands.sync.connection.merged import KEPT_BYTES_MAX, KEPT_MIN, KEPT_SECONDS, Merged


@dataclass(frozen=True)
class One:
    number: int
    payload: bytes = b"12"

    @property
    def identity_text(self) -> str:
        return str(self.number)


def tape(numbers: Iterable[int]) -> dict[int, set[str]]:
    """Return a tape whose rounds have merged the contributions of the same numbers."""
    return {number: {str(number)} for number in numbers}


def test_all_rounds_of_the_last_seconds_are_kept() -> None:
    """A failover may forget many rounds of a fast run."""
    kept: Merged[One] = Merged()
    for number in range(1000):
        kept.add(number, One(number), 0.01 * number)
    assert kept.first_round == 0
    assert [one.number for one in kept.undone(499, tape(range(500)))] == list(range(500, 1000))
    assert kept.undone(499, tape(range(500))) == []
    assert Merged[One]().first_round is None
    kept.add(500, One(500), KEPT_SECONDS + 4.005)
    assert [one.number for one in kept.undone(-1, {})] == list(range(401, 501))


def test_slow_rounds_and_large_payloads_are_kept_by_number() -> None:
    kept: Merged[One] = Merged()
    for number in range(20):
        kept.add(number, One(number), KEPT_SECONDS * 2 * number)
    assert [one.number for one in kept.undone(-1, {})] == list(range(20 - KEPT_MIN, 20))
    large = bytes(KEPT_BYTES_MAX // 8)
    for number in range(20):
        kept.add(number, One(number, large), 0.0)
    assert [one.number for one in kept.undone(-1, {})] == list(range(12, 20)), "more bytes are not kept"


def test_what_another_round_of_the_same_number_has_not_merged_is_undone() -> None:
    kept: Merged[One] = Merged()
    for number in (6, 7, 8, 9, 10):
        kept.add(number, One(number), 0.0)
    # Round 7 is not on the tape any more, round 8 has merged another one, and 9 was merged earlier than before.
    assert kept.undone(9, {6: {"6"}, 8: {"9"}, 9: {"x"}}) == [One(8), One(10)]
    assert [kept.first_round, len(kept)] == [6, 3]
