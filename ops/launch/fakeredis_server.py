"""Serve fakeredis on a port: the process behind the kind `fakeredis`."""

import sys

from archipelago.ops.launch.redis_probe import LOOPBACK


def serve(port: int) -> None:
    """Serve until the process ends."""
    from fakeredis import TcpFakeServer

    with TcpFakeServer((LOOPBACK, port)) as server:
        server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
