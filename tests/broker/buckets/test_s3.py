"""Copies on an S3 server: real requests of s3fs, and refusals.

The server runs on this machine (moto), behind a layer that refuses requests. It needs moto, flask and s3fs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.folder import BucketError, open_bucket
from tests.broker.buckets.test_buckets import ABOUT, content, written
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


class Refusing:
    """A WSGI application before another one, which refuses requests with these methods."""

    def __init__(self, application: Callable[[dict[str, Any], Respond], Iterable[bytes]]) -> None:
        self.application, self.methods = application, frozenset[str]()

    def __call__(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        """Answer one request."""
        method = environ["REQUEST_METHOD"]
        if method not in self.methods:
            return self.application(environ, respond)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        respond("403 AccessDenied", [("Content-Type", "application/xml")])
        return [b"" if method == "HEAD" else b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"]


@pytest.fixture(scope="module")
def running() -> Iterator[Refusing]:
    """A server with one bucket, to which s3fs points, for all tests, because the client takes seconds to load."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = Refusing(DomainDispatcherApplication(create_backend_app))
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
            yield application
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def address(running: Refusing, tmp_path: Path) -> str:
    """An empty folder in the bucket."""
    return f"s3://{BUCKET}/{tmp_path.name}/demo/merger"


def test_a_checkpoint_comes_back_from_s3(address: str, tmp_path: Path) -> None:
    bundles = Bundles(open_bucket(address, "checkpoints"))
    for number in (1, 2):
        bundles.put(number, written(tmp_path, number), ABOUT)
    assert bundles.numbers() == [1, 2]
    bundles.get(2, tmp_path / "new" / "2")
    assert content(tmp_path / "new" / "2") == content(tmp_path / "2")
    bundles.prune(keep=1)
    assert {path.partition("-")[0] for path in bundles.folder.tree()} == {"2", "2.json"}


def test_missing_rights_buckets_and_credentials_show_at_the_start(
    running: Refusing, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for methods in ({"GET", "HEAD", "PUT", "POST"}, {"PUT"}, {"GET", "HEAD"}):
        running.methods = frozenset(methods)
        with failing(BucketError, "bucket.denied"):
            open_bucket(address)
    running.methods = frozenset()
    with failing(BucketError, "bucket.missing"):
        open_bucket("s3://another/x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with failing(BucketError, "bucket.denied"):
        open_bucket(address)
    s3fs.S3FileSystem.clear_instance_cache()
