"""Expect an error by its type and its code, so that tests never depend on the wording of a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from archipelago.broker.errors import ArchipelagoError


@contextmanager
def failing(
    kind: type[ArchipelagoError] = ArchipelagoError, code: str = ""
) -> Iterator[pytest.ExceptionInfo[ArchipelagoError]]:
    """Fail unless the block raises an error of that type with that code (default: the code of the type)."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == (code or kind.code)
