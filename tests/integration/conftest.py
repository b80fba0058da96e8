"""A small corpus of real text, for runs of a second or two, and servers with TLS."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.preparation import prepare_text
from tests.certificates import Certificates, make_certificates
from tests.clusters import PATIENT_MS, Cluster, Tls, Watched
from tests.conftest import Until
from tests.harness.forks import Forks
from tests.harness.processes import Processes
from tests.servers import redis_program


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare `small-text` from modules of the standard library, and return the folder."""
    folder = tmp_path_factory.mktemp("corpora")
    source = tmp_path_factory.mktemp("source")
    for name in ("argparse.py", "ast.py", "datetime.py", "inspect.py", "pathlib.py", "typing.py"):
        path = Path(sysconfig.get_path("stdlib")) / name
        if path.exists():
            (source / name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder))
        prepare_text(source, "small-text")
    return folder


@pytest.fixture
def corpus(corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> OpenCorpus:
    """Open the small corpus, and let processes of the test find it, too."""
    from archipelago.islands.data.corpus import open_corpus

    monkeypatch.setenv("ARCHIPELAGO_DATA", str(corpus_folder))
    return open_corpus("small-text")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def tls(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """What the servers of a cluster need to speak TLS only. Their certificate is issued to 127.0.0.1."""
    program = redis_program(tmp_path_factory.mktemp("program"))
    return Tls(program.path, certificates.authority, certificates.server)


@pytest.fixture(scope="session")
def tls_cluster(tls: Tls, tmp_path_factory: pytest.TempPathFactory, until: Until) -> Iterator[Cluster]:
    """A cluster of three primaries with a replica each, which speaks TLS only."""
    made = Cluster(tmp_path_factory.mktemp("tls-cluster"), until, replicas=1, tls=tls, silent_ms=PATIENT_MS)
    yield made
    made.end()


@pytest.fixture(scope="session")
def tls_watched(tls: Tls, tmp_path_factory: pytest.TempPathFactory, until: Until) -> Iterator[Watched]:
    """A primary with a replica and Sentinels, all of which speak TLS only."""
    made = Watched(tmp_path_factory.mktemp("tls-watched"), until, tls=tls, silent_ms=PATIENT_MS)
    yield made
    made.end()


@pytest.fixture
def processes(tmp_path: Path, corpus: OpenCorpus, commands: Forks) -> Iterator[Processes]:
    started = Processes(tmp_path, commands=commands)
    yield started
    started.end()
    started.show()
