"""fakeredis, with the answer of a real server where the two differ."""

from __future__ import annotations

from typing import Any

from fakeredis import _msgs
from fakeredis._helpers import SimpleError
from fakeredis.commands_mixins.streams_mixin import StreamsCommandsMixin
from fakeredis.model import XStream

_XRANGE = StreamsCommandsMixin._xrange


def answer_as_redis() -> None:
    """Let XREAD of a key that is no stream be an error of the server, and not one of Python. For good."""

    def xrange(value: Any, *rest: Any) -> Any:
        if value is not None and not isinstance(value, XStream):
            raise SimpleError(_msgs.WRONGTYPE_MSG)
        return _XRANGE(value, *rest)

    setattr(StreamsCommandsMixin, "_xrange", staticmethod(xrange))  # noqa: B010 - a type checker forbids the other way
