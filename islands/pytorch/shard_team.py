"""The processes of one mesh, and what they do together when their leader says so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Manifest
from archipelago.islands.pytorch.module import ModuleParameters, pieces
from archipelago.islands.pytorch.parallel import Said, Team
from archipelago.islands.pytorch.shards import Courier, Spread, own_part
from archipelago.islands.pytorch.state import OptimizerState


class Work(IntEnum):
    """What all processes do together, when the leader says so."""

    BEGIN = 1
    MEASURE = 2
    ADOPT = 3
    GIVE_STATE = 4
    GIVE_TENSOR = 5


class ShardTeam(Team):
    """The processes of one mesh.

    Attributes:
        mesh: The mesh.
        on_host: Carries tensors of the host.
        courier: Carries tensors of the model's device.
    """

    def __init__(self, mesh: Any, device: Any, purpose: str) -> None:
        """Make the groups. All processes of the mesh do this at the same time.

        Args:
            mesh: The mesh.
            device: The device of the model in this process.
            purpose: The call that all processes make, in words.

        Raises:
            ConfigError: The processes make different calls (`loop.not-together`).
        """
        super().__init__(None, [int(rank) for rank in mesh.mesh.flatten()])
        self.mesh = mesh
        self.on_host = self.courier = Courier(self.messages, self.ranks)
        self._require_together(purpose)
        if device.type != "cpu":
            group = mesh.get_group() if mesh.ndim == 1 else dist.new_group(self.ranks, use_local_synchronization=True)
            self.courier = Courier(group, self.ranks)

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.on_host.leads

    def _require_together(self, purpose: str) -> None:
        number = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:6])
        bounds = torch.tensor([number, -number])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.messages)
        if bounds.tolist() != [number, -number]:
            raise ConfigError(
                f"this process calls `{purpose}`, and another process of this island calls something else",
                "With FSDP2, call `create` and `join` in every process, in the same order.",
                code="loop.not-together",
            )

    def tell(self, work: Work, about: int = 0) -> None:
        """Say what all processes do now."""
        self.exchange(Said(work=work, about=about))

    def share_manifest(self, manifest: Manifest | None, size: int = 0) -> Manifest:
        """Return the leader's manifest. The others give the size of its message."""
        if manifest is not None:
            data = json.dumps(manifest.to_fields()).encode()
            self.tell(Work.BEGIN, len(data))
            self.share_on_host(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return manifest
        message = torch.empty(size, dtype=torch.uint8)
        self.share_on_host(message)
        return Manifest.from_fields(json.loads(message.numpy().tobytes()))

    # -- the optimisers' state, which travels over the hosts' memory --------------------------------------------------

    def gather_state(self, state: OptimizerState) -> list[Any]:
        """Return whole copies of all values in the leader's memory, and nothing in the others'."""
        return [
            self._gathered(Spread.of(entry.name, entry.example, self.mesh), entry.present(), tuple(entry.tensor.shape))
            for entry in state.entries
        ]

    def scatter_state(self, state: OptimizerState, values: Sequence[Any]) -> None:
        """Replace the optimisers' state by values that the leader has."""
        for number, entry in enumerate(state.entries):
            own = torch.empty_like(entry.present(), device="cpu")
            spread = Spread.of(entry.name, entry.example, self.mesh)
            self.on_host.scatter(spread, values[number] if values else None, own)
            entry.put(own)

    # -- whole tensors of the model, for `create` and for digests -----------------------------------------------------

    def gather_tensor(self, parameters: ModuleParameters, place: int) -> Any:
        """Return one whole tensor in the memory of the leader's host, and None in the others'."""
        name, view = list(parameters.views().items())[place]
        return self._gathered(parameters.spreads[name], own_part(view).detach(), tuple(view.shape))

    def whole(self, parameters: ModuleParameters, name: str) -> Any:
        """Return one whole tensor in the memory of the leader's host. Only the leader calls this."""
        place = list(parameters.views()).index(name)
        self.tell(Work.GIVE_TENSOR, place)
        return self.gather_tensor(parameters, place)

    def frozen_values(self, parameters: ModuleParameters) -> list[FrozenValues]:
        """Return the parameters that are not trained. The leader gathers those that are read, one at a time."""

        def read(name: str) -> Iterator[memoryview]:
            yield from pieces(self.whole(parameters, name))

        return [replace(values, pieces=partial(read, values.name)) for values in parameters.frozen_values()]

    def _gathered(self, spread: Spread, own: Any, shape: tuple[int, ...]) -> Any:
        whole = torch.empty(shape, dtype=own.dtype) if self.leads else None
        self.on_host.gather(spread, own.cpu(), whole)
        return whole
