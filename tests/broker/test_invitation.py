"""Tests of join files and of the records of members."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker import invitation
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.invitation import MERGER_KEY, Invitation, Member, Members, key_text
from tests.failing import failing
from tests.tiers import examples

KEY = key_text(bytes(range(32)))
OSLO = Invitation(
    url="rediss://demo.oslo:secret@hub:6380/0", run="demo", name="oslo", role="island", private_key=KEY,
    merger_key=key_text(bytes(32)), ca_certificate="-----BEGIN CERTIFICATE-----\n", expires=2e9,
)  # fmt: skip


def test_a_join_file_is_private_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "demo.oslo.join"
    invitation.write(path, OSLO)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert invitation.read(path) == OSLO


def test_secrets_are_not_shown() -> None:
    shown = repr(OSLO)
    assert "secret" not in shown
    assert KEY not in shown


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_join_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "demo.oslo.join"
    invitation.write(path, OSLO)
    path.chmod(mode)
    with failing(ConfigError, "invitation.open"):
        invitation.read(path)


@pytest.mark.parametrize(("mode", "can_be_read"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_a_mounted_secret_is_read_through_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, can_be_read: bool
) -> None:
    path = tmp_path / "demo.oslo.join"
    invitation.write(path, OSLO)
    path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if can_be_read:
        assert invitation.read(path) == OSLO
        return
    with failing(ConfigError, "invitation.open"):
        invitation.read(path)


def test_a_missing_join_file_is_an_error(tmp_path: Path) -> None:
    with failing(ConfigError, "invitation.no-file"):
        invitation.read(tmp_path / "nowhere.join")
    with failing(ConfigError, "invitation.no-file"):
        invitation.read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"archipelago": 2}, {"role": "king"}, {"role": ["island"]}, {"run": "../x"}, {"name": ""}, {"name": 1},
        {"url": "http://hub"}, {"private_key": "x"}, {"merger_key": key_text(bytes(31))}, {"expires": "soon"},
        {"expires": float("nan")}, {"ca_certificate": 3}, {"more": 1}, {"expires": True},
    ],
)  # fmt: skip
def test_damaged_join_files_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "demo.oslo.join"
    invitation.write(path, OSLO)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with failing(ConfigError, "invitation.damaged"):
        invitation.read(path)


@settings(max_examples=examples(200))
@given(st.binary(max_size=64) | st.recursive(st.none() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        Invitation.from_json(content)
    with pytest.raises(WireError):
        Member.from_json(content)


def test_members_are_read_and_damaged_ones_admit_nobody() -> None:
    oslo = Member("island", KEY, 10.0, "demo.oslo")
    members = Members.of({"oslo": oslo.to_json(), MERGER_KEY: KEY, "bad": "{}", "a:b": oslo.to_json()})
    assert members.by_name == {"oslo": oslo}
    assert members.merger_key == KEY
    assert members.faults.keys() == {"bad", "a:b"}
    assert members.is_signed
    assert not Members.of({}).is_signed


def test_an_expiry_is_reached() -> None:
    assert [OSLO.has_expired(now) for now in (2e9 - 1, 2e9)] == [False, True]
    assert not replace(OSLO, expires=None).has_expired(1e18)
    assert [Member("viewer", expires=5.0).has_expired(now) for now in (4.0, 5.0)] == [False, True]
