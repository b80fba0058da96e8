"""Snapshots on each host of an island: the leader passes on what came over the wire, and each host decodes it itself.

All of them decode the same bytes to the same bits, so no host gets a float32 vector from another.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.manifest import Manifest
from archipelago.islands.hosts.frames import unfit
from archipelago.islands.hosts.team import Team
from archipelago.islands.sync.connection.snapshots import Download, decoded


def relay_to(team: Team) -> Callable[[Download], None]:
    """Return what passes downloads of the leader's link on to the other hosts."""

    def relay(download: Download) -> None:
        base = -1 if download.base is None else download.base
        payloads = [np.frombuffer(payload, np.uint8) for payload in download.payloads]
        team.tell("hold", (download.fragment, download.number, base), payloads)

    return relay


class HeldSnapshots:
    """The snapshots that a host has decoded, by fragment and by the number of the leader's arrival.

    A thread decodes them, so that the next steps do not wait. The leader may have downloaded newer ones than the one
    that it adopts.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._pool = ThreadPoolExecutor(1, "decode")
        self._held: list[dict[int, Future[Vector]]] = [{} for _ in manifest.sizes]

    def hold(self, download: Download) -> None:
        """Decode a download. Raises WireError (`hosts.message`) if this host does not have what it builds on."""
        held = self._held[download.fragment]
        base = None if download.base is None else self._known(download.fragment, download.base)

        def decode() -> Vector:
            return decoded(self._manifest, download, None if base is None else base.result())

        held[download.number] = self._pool.submit(decode)  # a base was submitted earlier, so no thread waits for itself

    def take(self, fragment: int, number: int) -> Vector:
        """Return a snapshot's vector. Raises WireError if it is not there (`hosts.message`), or was damaged."""
        return self._known(fragment, number).result()

    def _known(self, fragment: int, number: int) -> Future[Vector]:
        found = self._held[fragment].get(number)
        if found is None:
            raise unfit(f"snapshot {number} of fragment {fragment} did not come before")
        return found

    def forget(self, fragment: int, number: int) -> None:
        """Forget what came before an adopted snapshot; and that one too, if no difference builds on it."""
        first = number if self._manifest.config.wire.sends_differences else number + 1
        self._held[fragment] = {each: held for each, held in self._held[fragment].items() if each >= first}
