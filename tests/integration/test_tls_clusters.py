"""Clusters and Sentinels that speak TLS only: rounds, redirections, replicas, certificates of a name, and mistakes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from redis.crc import key_slot

from archipelago.broker.errors import BadUrlError, BrokerError, UnreachableError
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.servers import servers_at
from archipelago.broker.redis.transport import connect
from archipelago.ops.watch.doctor.main import check_server
from tests import samples
from tests.certificates import Certificates, Identity, signed
from tests.clusters import PASSWORD, Cluster, Watched
from tests.conftest import Until
from tests.failing import failing

pytestmark = [pytest.mark.full, pytest.mark.processes]

#: Payloads that are stored as chunks.
NEW = bytes(range(256)) * 400
NEWER = NEW[::-1]
#: The next round of fragment 0, of two fragments.
THIRD = 3


class Run:
    """A run with an island, a merger and its lease."""

    def __init__(self, url: str) -> None:
        self.name = f"run-{uuid.uuid4().hex[:8]}"
        self.island, self.merger = connect(url, self.name), connect(url, self.name)
        samples.begin(self.island, width=len(NEW))
        self.epoch = self.merger.merger.acquire("merger", 600.0) or 0

    def merge(self, payload: bytes, number: int = 1) -> None:
        """Contribute to a round of fragment 0, merge that, and adopt."""
        sent = samples.contribution(payload, sequence=number)
        self.island.island.publish(sent, payload)
        (header,) = self.merger.merger.updates(5.0)
        delivery = header.with_payload()
        assert (delivery.contribution, delivery.payload) == (sent, payload)
        self.merger.merger.commit(self.epoch, samples.commit([delivery.entry], payload, number))
        assert self.adopted() == payload

    def adopted(self) -> bytes:
        """Return the payload of the newest version of fragment 0."""
        return self.island.reader.fragment(0)[1]

    def goes_on(self) -> bool:
        """Return whether both reach the server that holds the run now, and the merger has its lease there."""
        try:
            self.island.island.heartbeat(samples.heartbeat())
            self.epoch = self.merger.merger.acquire("merger", 600.0) or 0
        except UnreachableError:
            return False
        return self.epoch > 0


@contextmanager
def begun(url: str) -> Iterator[Run]:
    run = Run(url)
    with closing(run.island), closing(run.merger):
        yield run


def test_a_round_follows_its_slot(tls_cluster: Cluster, until: Until) -> None:
    with begun(tls_cluster.url) as run:
        run.merge(NEW)
        old = tls_cluster.owner(run.name)
        new = next(node for node in tls_cluster.nodes if node is not old and node.role() == "master")
        tls_cluster.move_slot(key_slot(Keys(run.name).manifest.encode()), old, new)
        until(run.goes_on, "the connections to follow the slot")
        run.merge(NEWER, THIRD)
        assert run.merger.connection.instance().startswith(new.client.info("server")["run_id"])


@contextmanager
def certified(cluster: Cluster, identity: Identity) -> Iterator[None]:
    """Let all nodes show another certificate."""

    def show(shown: Identity) -> None:
        for node in cluster.nodes:
            node.client.config_set("tls-cert-file", str(shown.certificate), "tls-key-file", str(shown.key))

    assert cluster.tls is not None
    show(identity)
    try:
        yield
    finally:
        show(cluster.tls.server)


def test_nodes_may_have_a_certificate_of_the_name_by_which_the_cluster_is_reached(
    tls_cluster: Cluster, certificates: Certificates
) -> None:
    """The nodes tell each other's IP addresses, as those of many managed clusters do."""
    authority = certificates.authority.certificate
    named = signed(authority.parent, "named", "authority", "subjectAltName=DNS:localhost")
    first = tls_cluster.nodes[0].port
    with certified(tls_cluster, named):
        for options, pinned in ((f"?ssl_ca_certs={authority}", ""), ("", authority.read_text())):
            url = f"rediss+cluster://:{PASSWORD}@localhost:{first}{options}"
            with closing(servers_at(url, pinned)) as servers:
                for node in tls_cluster.nodes[:3]:
                    assert servers.client(key_of(tls_cluster, node.port)).ping()
        with failing(BrokerError, "broker.tls"):
            connect(tls_cluster.url, "any")


def key_of(cluster: Cluster, port: int) -> str:
    """Return a key whose slot a node owns."""
    return next(key for key in map(str, range(10_000)) if cluster.holder(key).port == port)


def check_mistakes(url: str, certificates: Certificates) -> None:
    """Check that doctor finds no problem at an address, and that mistakes about its TLS are told."""
    with begun(url) as run:
        found = check_server(url, run.name, 0.0).findings
    assert {"topology.ok", "encryption.ok", "password.ok", "rights.ok"} <= {each.code for each in found}
    assert not [each.what for each in found if each.level == "problem"]
    option = f"ssl_ca_certs={certificates.authority.certificate}"
    for wrong in ("", f"ssl_ca_certs={certificates.stranger.certificate}"):
        with failing(BrokerError, "broker.tls") as caught:
            connect(url.replace(option, wrong), "any")
        assert not isinstance(caught.value, UnreachableError), "a retry cannot help"
    plain = url.replace("rediss", "redis")
    with failing(UnreachableError) as caught:
        connect(plain.replace(option, ""), "any")
    assert "rediss://" in caught.value.remedy
    with failing(BadUrlError) as caught:
        connect(plain, "any")
    assert "ssl_" in caught.value.what.replace(option, "") and PASSWORD not in str(caught.value)


def test_mistakes_about_a_cluster_are_told(tls_cluster: Cluster, certificates: Certificates) -> None:
    check_mistakes(tls_cluster.url, certificates)


def test_a_round_follows_the_primary_that_sentinels_choose(
    tls_watched: Watched, certificates: Certificates, until: Until
) -> None:
    check_mistakes(tls_watched.url, certificates)
    wrong = tls_watched.url.replace(f"sentinel_password={PASSWORD}", "sentinel_password=wrong")
    with failing(BrokerError, "broker.access") as caught:
        connect(wrong, "any")
    assert not isinstance(caught.value, UnreachableError) and "sentinel_password" in caught.value.remedy
    with begun(tls_watched.url) as run:
        run.merge(NEW)
        until(tls_watched.is_copied, "the replica to have the round")
        tls_watched.sentinels[0].client.execute_command("SENTINEL", "FAILOVER", "mine")
        until(lambda: tls_watched.replica.role() == "master", "the Sentinels to promote the replica")
        tls_watched.primary.kill()
        until(run.goes_on, "the connections to follow the primary")
        run.merge(NEWER, THIRD)
