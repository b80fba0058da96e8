"""The processes of one island in PyTorch, and what they do together when their leader says so.

Messages, and the optimisers' state that arrives, go over the hosts' memory. Parameters, and state that is given, go
over the processes' own group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from archipelago.broker.shards.reader import on_a_thread
from archipelago.islands.pytorch.host import HostCopy
from archipelago.islands.pytorch.module import ModuleParameters
from archipelago.islands.pytorch.pieces import own_piece, piece_of, whole_of
from archipelago.islands.pytorch.state import OptimizerState
from archipelago.islands.team.protocol import Team

#: How much longer a process waits for the others than the first one, which names those that are missing.
LATE_SECONDS = 1.0
log = logging.getLogger(__name__)


def ranks_of(mesh: Any, group: Any) -> list[int]:
    """Return the ranks of an island's processes, the leader's first."""
    return dist.get_process_group_ranks(group) if mesh is None else [int(rank) for rank in mesh.mesh.flatten()]


class ProcessTeam(Team):
    """The processes of one island.

    Attributes:
        ranks: The ranks of the processes. The first one leads.
    """

    def __init__(self, mesh: Any, group: Any, device: Any, call: str) -> None:
        """Make the groups. All processes of the island do this at the same time.

        Args:
            mesh: The mesh that the model is split over; None if all processes hold all of it.
            group: The process group of DistributedDataParallel, without a mesh.
            call: The call that all processes make, in words.

        Raises:
            ConfigError: The processes make different calls (`loop.not-together`).
        """
        self.ranks = ranks_of(mesh, group)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        with self.waiting():
            self._messages = dist.new_group(self.ranks, backend="gloo", use_local_synchronization=True)
        self.leaves_together = mesh is not None
        self.require_together(call)
        self._group = group  # for tensors of the model's device
        if mesh is not None and device.type == "cpu":
            self._group = self._messages
        elif mesh is not None:
            several = mesh.ndim > 1
            self._group = dist.new_group(self.ranks, use_local_synchronization=True) if several else mesh.get_group()

    def _sum(self, numbers: Sequence[int]) -> Sequence[int]:
        message = torch.tensor([int(value) for value in numbers], device="cpu")
        dist.all_reduce(message, group=self._messages)
        found: list[int] = message.tolist()
        return found

    def meet(self, seconds: float) -> None:
        # The barrier's own limit holds in the first process only. Another one may wait for half an hour.
        barrier = partial(dist.monitored_barrier, self._messages, timedelta(seconds=seconds), wait_all_ranks=True)
        on_a_thread(barrier).result(seconds + LATE_SECONDS)

    def share_bytes(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        message = torch.from_numpy(data.copy())
        dist.broadcast(message, self.ranks[0], group=self._messages)
        shared: NDArray[np.uint8] = message.numpy()
        return shared

    def share(self, tensors: Sequence[Any]) -> None:
        """Overwrite whole tensors of the model by the leader's, in place."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), self.ranks[0], group=self._group)

    # -- the optimisers' state, which travels over the hosts' memory --------------------------------------------------

    def agree_on_state(self, state: OptimizerState | None) -> None:
        """Let the state travel only if it has one layout in all processes. Some optimisers share their work out.

        All processes call this after `rehearse`.
        """
        layout = state.digest.tobytes().hex() if state is not None and state.can_travel else ""
        if not self.is_same(layout) and state is not None:
            what = "this optimiser's state is not shared with peers: it differs between the processes of this island"
            log.warning(what)
            state.can_travel = False

    def gather_state(self, state: OptimizerState) -> list[Any]:
        """Return copies of all whole values on their way to the leader's memory, and nothing in the others."""
        wholes = (whole_of(entry.present(), entry.example) for entry in state.entries)
        return [HostCopy(whole) for whole in wholes if self.leads]

    def scatter_state(self, state: OptimizerState, values: Sequence[Any]) -> None:
        """Replace the optimisers' state by values that the leader has."""
        for number, entry in enumerate(state.entries):
            whole = values[number] if values else torch.from_numpy(entry.placeholder.copy())
            dist.broadcast(whole, self.ranks[0], group=self._messages)
            entry.put(piece_of(whole, entry.example))

    # -- whole tensors of the model, for `create` and for digests -----------------------------------------------------

    def gather_tensor(self, parameters: ModuleParameters, place: int) -> Any:
        """Return one whole tensor in the memory of the leader's host, and None in the others'."""
        view = list(parameters.views().values())[place]
        whole = whole_of(own_piece(view).detach(), view)
        return whole.cpu() if self.leads else None
