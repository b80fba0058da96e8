"""What tests of users' own loops share, whatever the framework."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from archipelago.broker.config import (
    OWN_MODEL,
    InnerConfig,
    MergeConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
)
from archipelago.broker.redis.transport import connect
from archipelago.merger.service import Merger

CONFIG = RunConfig(
    model=ModelConfig(size=OWN_MODEL),
    inner=InnerConfig(steps=1000),
    sync=SyncConfig(interval=4, fragments=2, window=2, quorum=1, grace=0.0),
    merge=MergeConfig(embedding="average", rest="rda"),  # the tests expect exact sums
    outer=OuterConfig(rule="sgd", learning_rate=1.0),
    wire=WireConfig(up="float32", thin="", down="float32"),
)


@contextmanager
def served(url: str) -> Iterator[Merger]:
    """Serve the run `own` in another thread."""
    merger, stop = Merger(connect(url, "own"), holder="merger"), threading.Event()
    assert merger.acquire()
    merger.load()

    def serve() -> None:
        while not stop.is_set():
            merger.turn(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield merger
    finally:
        stop.set()
        thread.join()


def merged_by(merger: Merger) -> dict[str, np.ndarray[Any, Any]]:
    """Return the run's newest parameters by name, as float32."""
    found = {}
    for rows, fragment in zip(merger.manifest.layout, merger.fragments, strict=True):
        for tensor, offset in rows:
            part = fragment.published_N[offset : offset + tensor.size]
            found[tensor.name] = np.array(part).reshape(tensor.shape)
    return found
