"""Copies on an S3 server: real requests of s3fs, with refusals and outages.

The server runs on this machine (moto), behind a layer that injects faults. It needs moto, flask and s3fs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.copier import Copier
from archipelago.broker.buckets.folder import BucketError, BucketFolder, open_bucket
from tests.broker.buckets.test_buckets import ABOUT, content, offer, written
from tests.failing import failing
from tests.pytorch import required

required("moto")
s3fs = required("s3fs")
pytestmark = [
    pytest.mark.full,
    # moto and botocore use what newer versions of Python and of their packages call deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
BUCKET = "runs"
Respond = Callable[..., Any]


@dataclass
class Faults:
    """What goes wrong at the server.

    Attributes:
        status: The status with which requests are refused; 0 for none.
        methods: The methods that are refused; empty for all.
        after: The number of requests of these methods that still succeed.
    """

    status: int = 0
    methods: tuple[str, ...] = ()
    after: int = 0

    def end(self) -> None:
        """End all faults."""
        self.status, self.methods, self.after = 0, (), 0

    def refuses(self, method: str) -> bool:
        """Return whether a request is refused now."""
        if not self.status or (self.methods and method not in self.methods):
            return False
        self.after -= 1
        return self.after < 0


_CODES = {403: "AccessDenied", 404: "NoSuchBucket", 500: "InternalError", 503: "SlowDown"}


class FaultyServer:
    """A WSGI application before another one."""

    def __init__(self, application: Callable[[dict[str, Any], Respond], Iterable[bytes]], faults: Faults) -> None:
        self.application, self.faults = application, faults

    def __call__(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        """Answer one request."""
        method = environ["REQUEST_METHOD"]
        if self.faults.refuses(method):
            code = _CODES[self.faults.status]
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            respond(f"{self.faults.status} {code}", [("Content-Type", "application/xml")])
            return [b"" if method == "HEAD" else body]
        return self.application(environ, respond)


@pytest.fixture(scope="module")
def running() -> Iterator[Faults]:
    """A server with one bucket, to which s3fs points, for all tests, because the client takes seconds to load."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    faults = Faults()
    application = FaultyServer(DomainDispatcherApplication(create_backend_app), faults)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "user")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            s3fs.S3FileSystem().mkdir(BUCKET)
            yield faults
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def faults(running: Faults) -> Iterator[Faults]:
    """The faults of the server, none at first."""
    yield running
    running.end()


@pytest.fixture
def address(faults: Faults, tmp_path: Path) -> str:
    """An empty folder in the bucket."""
    return f"s3://{BUCKET}/{tmp_path.name}/demo/merger"


def test_a_checkpoint_comes_back_from_s3(faults: Faults, address: str, tmp_path: Path) -> None:
    bundles = Bundles(open_bucket(address, "checkpoints"))
    for number in (1, 2):
        bundles.put(number, written(tmp_path, number), ABOUT)
    assert bundles.numbers() == [1, 2]
    bundles.get(2, tmp_path / "new" / "2")
    assert content(tmp_path / "new" / "2") == content(tmp_path / "2")
    bundles.prune(keep=1)
    assert {path.partition("-")[0] for path in bundles.folder.tree()} == {"2", "2.json"}


def test_missing_rights_buckets_and_credentials_show_at_the_start(
    faults: Faults, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for methods in ((), ("PUT",), ("GET", "HEAD")):
        faults.status, faults.methods = 403, methods
        with failing(BucketError, "bucket.denied"):
            open_bucket(address)
    faults.end()
    with failing(BucketError, "bucket.missing"):
        open_bucket("s3://another/x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with failing(BucketError, "bucket.denied"):
        open_bucket(address)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_without_deletions_can_be_used(faults: Faults, address: str, tmp_path: Path) -> None:
    faults.status, faults.methods = 403, ("DELETE", "POST")
    copier = Copier(Bundles(open_bucket(address)), tmp_path, tmp_path / "uploads", ABOUT, keep=1)
    for number in (1, 2):
        offer(copier, number)
        assert copier.turn() == 0
    assert copier.bundles.numbers() == [1, 2]


def test_an_outage_amid_an_upload_loses_nothing(faults: Faults, address: str, tmp_path: Path) -> None:
    copier = Copier(Bundles(BucketFolder(address)), tmp_path, tmp_path / "uploads", ABOUT, keep=3)
    offer(copier, 1)
    assert copier.turn() == 0
    offer(copier, 2)
    for after in (0, 1):
        faults.status, faults.methods, faults.after = 500, ("PUT",), after
        assert copier.turn() > 0
        assert copier.bundles.numbers() == [1]
    faults.status = 0
    assert copier.turn() == 0
    assert copier.bundles.numbers() == [1, 2]
    copier.bundles.get(2, tmp_path / "new")
    assert content(tmp_path / "new") == content(tmp_path / "2")
