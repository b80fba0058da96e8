"""Where the time of a sync goes: count the seconds that named functions take in a process.

A function's time excludes that of named functions which it calls. Processor time is that of the calling thread; the
threads of XLA and numpy count only in the row of the whole process.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_ISLANDS, _MERGER, _REDIS = "archipelago.islands.sync", "archipelago.merger", "archipelago.broker.redis"

#: The functions of an island, each with the name of its piece, in the order of a sync.
OF_ISLAND = {
    f"{_ISLANDS}.replica:Replica.measure": "quantise",
    f"{_ISLANDS}.connection.outbox:body_of": "wait for the device and copy",
    f"{_ISLANDS}.connection.outbox:pack_body": "compress",
    f"{_ISLANDS}.connection.outbox:digest": "digest",
    f"{_REDIS}.islands:RedisIsland.publish": "upload",
    f"{_REDIS}.reader:RedisReader.difference": "download the difference",
    "archipelago.broker.wire:Unpacking.arrived": "decode and add",
    f"{_ISLANDS}.connection.snapshots:digest_of": "digest of the parameters",
    f"{_ISLANDS}.replica:Replica.adopt": "adopt",
}
#: The same for the merger.
OF_MERGER = {
    f"{_REDIS}.merger:RedisMerger.updates": "wait for contributions",
    f"{_REDIS}.chunks:ChunkStore.fetch": "download",
    f"{_MERGER}.round_merge:digest": "digest",
    f"{_MERGER}.round_merge:unpack_encoded": "decompress",
    f"{_MERGER}.merge_rules:accumulate": "decode and add",
    f"{_MERGER}.round_merge:judge": "compare contributions",
    f"{_MERGER}.merge_rules:finish": "merge",
    f"{_MERGER}.spectra:Spectra.change": "spectra",
    f"{_MERGER}.round_merge:outer_step": "outer step",
    f"{_MERGER}.round_merge:publish": "quantise the difference",
    f"{_MERGER}.service:build_commit": "encode the commit",
    f"{_REDIS}.chunks:ChunkStore.place": "upload",
    f"{_REDIS}.merger:RedisMerger.commit": "transaction",
}
WHOLE = "whole process"


class Spent(NamedTuple):
    """What calls have taken: their number, seconds, and seconds of processor time."""

    calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.calls - other.calls, self.seconds - other.seconds, self.cpu_seconds - other.cpu_seconds)


class Pieces:
    """Counts the time of functions by name of their piece. Replaces the functions in their modules for good.

    Args:
        places: The name of the piece of each function, which is written `module:attribute` or `module:Class.attribute`.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._spent = dict.fromkeys(places.values(), Spent())
        self._lock, self._local = threading.Lock(), threading.local()
        for place, name in places.items():
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, attribute, self._timed(name, getattr(owner, attribute)))

    def spent(self) -> dict[str, Spent]:
        """Return what each piece has taken since the beginning, and last the whole process."""
        with self._lock:
            return {**self._spent, WHOLE: Spent(1, time.perf_counter(), time.process_time())}

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            outer, self._local.inner = getattr(self._local, "inner", Spent()), Spent()
            began = Spent(0, time.perf_counter(), time.thread_time())
            try:
                return function(*arguments, **named)
            finally:
                taken = Spent(1, time.perf_counter(), time.thread_time()) - began
                with self._lock:
                    before, inner = self._spent[name], self._local.inner
                    self._spent[name] = before - (inner - taken)
                self._local.inner = Spent(0, outer.seconds + taken.seconds, outer.cpu_seconds + taken.cpu_seconds)

        return timed
