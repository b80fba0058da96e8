"""Tests of join files and of the records of members."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker import invitation, signing
from archipelago.broker.errors import ConfigError, UnreachableError, WireError
from archipelago.broker.invitation import MEMBERS_MAX, MERGER_KEY, Invitation, Member, Members, key_text
from archipelago.broker.signing import KnownMembers
from tests.conftest import Until
from tests.failing import failing
from tests.tiers import examples

KEY = key_text(bytes(range(32)))
OSLO = Invitation(
    url="rediss://demo.oslo:secret@hub:6380/0", run="demo", name="oslo", role="island", private_key=KEY,
    merger_key=key_text(bytes(32)), ca_certificate="-----BEGIN CERTIFICATE-----\n",
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a join file of OSLO."""
    path = tmp_path / "demo.oslo.join"
    invitation.write(path, OSLO)
    return path


def test_a_join_file_is_private_and_is_read_back(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert invitation.read(path) == OSLO
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires": None}))  # as earlier versions wrote it
    assert invitation.read(path) == OSLO
    assert "secret" not in repr(OSLO)
    assert KEY not in repr(OSLO)
    for absent in (path.parent / "nowhere.join", path.parent):
        with failing(ConfigError, "invitation.file"):
            invitation.read(absent)


def test_a_join_file_that_others_can_read_is_refused(path: Path) -> None:
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with failing(ConfigError, "invitation.file"):
            pytest.fail(f"{mode:o}: {invitation.read(path)}")


def test_a_mounted_secret_is_read_through_its_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for mode in (0o440, 0o640):
        path.chmod(mode)
        assert invitation.read(path) == OSLO
    for mode in (0o660, 0o444):
        path.chmod(mode)
        with failing(ConfigError, "invitation.file"):
            pytest.fail(f"{mode:o}: {invitation.read(path)}")


CHANGES: list[dict[str, object]] = [
    {"archipelago": 2}, {"role": "king"}, {"role": ["island"]}, {"run": "../x"}, {"name": ""}, {"name": 1},
    {"url": "http://hub"}, {"private_key": "x"}, {"merger_key": key_text(bytes(31))},
    {"ca_certificate": 3}, {"more": 1}, {"expires": 2e9}, {"ca_certificate": "x" * invitation.FILE_BYTES_MAX},
]  # fmt: skip


def test_damaged_join_files_are_refused(path: Path) -> None:
    whole = json.loads(path.read_text())
    for change in CHANGES:
        path.write_text(json.dumps({**whole, **change}))
        with failing(ConfigError, "invitation.invalid"):
            pytest.fail(f"{str(change)[:80]}: {invitation.read(path)}")


@settings(max_examples=examples(200))
@given(st.binary(max_size=64) | st.recursive(st.none() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        Invitation.from_json(content)
    with pytest.raises(WireError):
        Member.from_json(content)


def test_members_are_read_and_damaged_ones_admit_nobody() -> None:
    oslo = Member("island", KEY, "demo.oslo")
    members = Members.of({"oslo": oslo.to_json(), MERGER_KEY: KEY, "bad": "{}", "a:b": oslo.to_json()})
    assert members.by_name == {"oslo": oslo}
    assert members.merger_key == KEY
    assert members.faults.keys() == {"bad", "a:b"}
    assert members.merger_key
    assert not Members.of({}).merger_key
    old = Members.of({"a": '{"role": "island", "expires": null}', "b": '{"role": "island", "expires": 2e9}'})
    assert (set(old.by_name), set(old.faults)) == ({"a"}, {"b"})
    assert len(Members.of({f"i{number}": oslo.to_json() for number in range(MEMBERS_MAX + 1)}).by_name) == MEMBERS_MAX


def test_known_members_count_while_their_server_is_away(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    """Shard 0 has the members, and the mergers and islands of all shards ask for them."""
    monkeypatch.setattr(signing, "FRESH_SECONDS", 0.01)
    now, state, name, ended = 0.0, "there", "old", threading.Event()

    def stored() -> Members:
        if state == "away":
            raise UnreachableError("it does not answer")
        found = name if state == "there" or not ended.wait() else "late"
        return Members.of({MERGER_KEY: KEY, found: Member("island", KEY).to_json()})

    known = KnownMembers("demo", stored, lambda: now)
    try:
        for state in ("there", "away", "hangs"):
            now += 6.0
            assert [known.islands() for _ in range(3)] == [["old"]] * 3, state
            assert known.key_of("old")
    finally:
        ended.set()
    state, name = "there", "new"
    now += 6.0
    assert known.islands() == ["late"], "an answer that took long counts"

    def is_read_again() -> bool:
        nonlocal now
        now += 6.0
        return known.islands() == ["new"]

    until(is_read_again, "the members were not read again")
    state = "away"
    now += 2 * signing.KNOWN_SECONDS
    with pytest.raises(UnreachableError):
        known.read()


def test_a_merger_asks_for_the_members_as_they_are_now() -> None:
    """The first invitation ends its lease, and it asks for another one at once."""
    found = Members.of({})
    known = KnownMembers("demo", lambda: found, lambda: 0.0)
    known.require_unsigned()
    found = Members.of({MERGER_KEY: KEY})
    known.require_unsigned()
    with failing(ConfigError, "signature.no-key"):
        known.require_unsigned(afresh=True)
