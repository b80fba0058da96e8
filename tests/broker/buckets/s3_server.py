"""An S3 server on this machine (moto) behind a layer that injects faults. It needs moto, flask and s3fs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import pytest

BUCKET = "runs"
Respond = Callable[..., Any]


@dataclass
class Faults:
    """What goes wrong at the server.

    Attributes:
        status: The status with which requests are refused; 0 for none.
        methods: The methods that are refused; empty for all.
        after: The number of requests of these methods that still succeed.
        seconds: How long each request takes.
        cut: Store only the first half of each body, and report success.
        requests: All requests that came, as (method, path).
    """

    status: int = 0
    methods: tuple[str, ...] = ()
    after: int = 0
    seconds: float = 0.0
    cut: bool = False
    requests: list[tuple[str, str]] = field(default_factory=list)

    def end(self) -> None:
        """End all faults."""
        self.status, self.methods, self.after, self.seconds, self.cut = 0, (), 0, 0.0, False

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
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.faults.requests.append((method, path))
        time.sleep(self.faults.seconds)
        if self.faults.refuses(method):
            code = _CODES[self.faults.status]
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            respond(f"{self.faults.status} {code}", [("Content-Type", "application/xml")])
            return [b"" if method == "HEAD" else body]
        if self.faults.cut and method == "PUT":
            data = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            data = data[: len(data) // 2]
            environ.update({"wsgi.input": BytesIO(data), "CONTENT_LENGTH": str(len(data))})
            for name in [name for name in environ if name.startswith("HTTP_X_AMZ_CHECKSUM")]:
                del environ[name]
        return self.application(environ, respond)


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Run the server with one bucket, and point s3fs to it."""
    import s3fs
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    faults = Faults()
    server = make_server(
        "127.0.0.1", 0, FaultyServer(DomainDispatcherApplication(create_backend_app), faults), threaded=True
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield faults
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        s3fs.S3FileSystem.clear_instance_cache()
