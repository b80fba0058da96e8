"""Addresses: what they name, and which are refused."""

from __future__ import annotations

import pytest

from archipelago.broker.address import Address, parse_address, redacted, with_user

CLUSTER = "rediss+cluster://u:p%2F@one:7000,[::1],three:7002?ssl_ca_certs=a"
SENTINEL = "rediss+sentinel://:p@one,two:26380/mine/2?sentinel_username=s&sentinel_password=q&client_name=c"


def test_a_cluster_has_nodes_and_a_sentinel_address_a_service() -> None:
    hosts = (("one", 7000), ("::1", 6379), ("three", 7002))
    assert parse_address(CLUSTER) == Address("cluster", "rediss://u:p%2F@one:7000?ssl_ca_certs=a", hosts)
    assert parse_address(SENTINEL) == Address(
        "sentinel", "rediss://:p@one:26379/2?client_name=c", (("one", 26379), ("two", 26380)), "mine",
        (("username", "s"), ("password", "q")),
    )  # fmt: skip
    assert parse_address("redis://host/1") == Address("server", "redis://host/1")


MISREAD = [
    "redis+cluster://one,,two", "redis+cluster://one/1", "redis+cluster://", "redis+cluster://one:x",
    "redis+sentinel://one", "redis+sentinel://one/", "redis+sentinel://one/mine/x", "unix+cluster:///a",
    "redis+other://one", "redis+cluster://one?sentinel_password=x", "redis+sentinel://one/mine?sentinel_other=x",
    "redis+cluster://one?ssl_ca_certs=a", "redis://one?ssl_ca_certs=a",
]  # fmt: skip


def test_an_address_that_would_be_misread_is_refused() -> None:
    for url in MISREAD:
        with pytest.raises(ValueError, match=r"."):
            pytest.fail(f"{url} was read as {parse_address(url)}")


def test_no_password_is_shown_and_members_keep_all_hosts() -> None:
    assert redacted(CLUSTER) == "rediss+cluster://u:***@one:7000,[::1],three:7002?ssl_ca_certs=a"
    assert redacted(SENTINEL).endswith("/mine/2?sentinel_username=s&sentinel_password=***&client_name=c")
    assert with_user(CLUSTER, "me", "w") == "rediss+cluster://me:w@one:7000,[::1],three:7002"
    assert parse_address(with_user(SENTINEL, "me", "w")).sentinel_options == parse_address(SENTINEL).sentinel_options
