"""The replicas of a PyTorch module: they measure contributions and adopt snapshots, in place, on the module's device.

The arithmetic is that of `islands.sync.replica`. As in JAX, the rounding of a dtype narrower than float32 is no
progress: the reference moves by it, or each round would pull the run's parameters to the numbers that this dtype has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from archipelago.broker.codecs import Parts, Vector
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.islands.pytorch.codecs import CODECS, TorchCodec
from archipelago.islands.pytorch.codecs import Parts as TorchParts
from archipelago.islands.pytorch.host import CopyStream, HostCopy, LateCopy, of_host
from archipelago.islands.pytorch.module import ModuleParameters
from archipelago.islands.pytorch.pieces import own_piece, piece_of, whole_of
from archipelago.islands.sync.adoption import RULES
from archipelago.islands.team.protocol import Work

#: The tensors of one fragment with their offsets in its vector.
Rows = tuple[tuple[Tensor, int], ...]
#: Tensors of a module by name.
Tensors = Mapping[str, Any]


class TorchReplica:
    """The references of all fragments, float32 [N] each. The parameters belong to the module and are passed in."""

    def __init__(self, manifest: Manifest, device: Any) -> None:
        """Begin without references. A CUDA device gets a stream for copies."""
        self.rule = RULES[manifest.config.adopt.rule]
        self.layout = manifest.layout
        self.codec = manifest.config.wire.up
        self.device = device
        self.references: list[Any] = []
        self._copies = CopyStream(device) if device.type == "cuda" else None

    def begin(self, params: Tensors, vectors: Sequence[Vector | None]) -> None:
        """Set the parameters to these float32 vectors, one for each fragment."""
        self.write(params, vectors)
        with torch.no_grad():
            self.references = [_flatten(rows, params) for rows in self.layout]

    def write(self, params: Tensors, vectors: Sequence[Vector | None]) -> None:
        """Set the parameters to these vectors. The references stay."""
        with torch.no_grad():
            for fragment, vector_N in enumerate(vectors):
                _write(self.layout[fragment], params, self._placed(fragment, vector_N))

    def measure(self, fragment: int, params: Tensors, codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts. The reference moves to what the merger will read."""
        chosen, reference_N = CODECS[codec or self.codec], self.references[fragment]
        with torch.no_grad():
            parts, restored_N = self._quantised(fragment, chosen, reference_N - _flatten(self.layout[fragment], params))
            self.references[fragment] = reference_N - restored_N
            return tuple(LateCopy(part, self._copies) if self._copies else HostCopy(part) for part in parts)

    def prepare(self, fragment: int, new_N: Vector) -> Any:
        """Bring a snapshot to the device, in the link's thread. `adopt` takes the result."""
        return self._copies.to_device(of_host(new_N)) if self._copies else new_N

    def adopt(self, fragment: int, params: Tensors, new_N: Any) -> Tensors:
        """Adopt a fragment's snapshot by the run's rule, in place, and return the parameters."""
        rows = self.layout[fragment]
        with torch.no_grad():
            own_N, reference_N = self.rule(
                self._placed(fragment, new_N), _flatten(rows, params), self.references[fragment]
            )
            _write(rows, params, own_N)
            if any(params[tensor.name].dtype != torch.float32 for tensor, _ in rows):
                reference_N = reference_N + (_flatten(rows, params) - own_N)
        self.references[fragment] = reference_N
        return params

    # -- where a fragment lives ---------------------------------------------------------------------------------------

    def _placed(self, fragment: int, vector_N: Any) -> Any:
        """Return a fragment's vector, of the host or prepared, where its tensors are."""
        if torch.is_tensor(vector_N):
            return self._copies.use(vector_N) if self._copies else vector_N
        return of_host(vector_N).to(self.device)

    def _quantised(self, fragment: int, chosen: TorchCodec, delta_N: Any) -> tuple[TorchParts, Any]:
        """Return the codec's parts of a fragment's outer gradient, and what the merger will read."""
        parts = chosen.quantise(delta_N)
        return parts, chosen.restore(parts, delta_N.shape[0])


def _flatten(rows: Rows, params: Tensors) -> Any:
    """Return a fragment's tensors as one new float32 vector [N], in the manifest's order."""
    return torch.cat([own_piece(params[tensor.name]).detach().reshape(-1).to(torch.float32) for tensor, _ in rows])


def _write(rows: Rows, params: Tensors, vector_N: Any) -> None:
    for tensor, offset in rows:
        own_piece(params[tensor.name]).copy_(vector_N[offset : offset + tensor.size].view(tensor.shape))


class TeamReplica(TorchReplica):
    """The replica in each process of an island, with its pieces of all references. One fragment at a time is whole."""

    def __init__(self, manifest: Manifest, parameters: ModuleParameters, team: Any) -> None:
        super().__init__(manifest, parameters.device)
        self._whole, self._sizes, self._team, self._views = manifest.layout, manifest.sizes, team, parameters.views
        self.layout = tuple(_own_rows(rows, parameters) for rows in manifest.layout)

    def prepare(self, fragment: int, new_N: Vector) -> Any:
        """Leave a snapshot for a model in pieces in the host's memory: devices hold one whole fragment at a time."""
        return new_N if self._team.leaves_together else super().prepare(fragment, new_N)

    def measure(self, fragment: int, params: Tensors, codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts. The references move everywhere."""
        self._team.tell(Work.MEASURE, fragment, codec or self.codec)
        return super().measure(fragment, params, codec)

    def adopt(self, fragment: int, params: Tensors, new_N: Any) -> Tensors:
        self._team.tell(Work.ADOPT, fragment)
        return super().adopt(fragment, params, new_N)

    def _placed(self, fragment: int, vector_N: Any) -> Any:
        """Return this process's piece of a fragment, which the leader gives."""
        if self._team.leads:
            whole_N = super()._placed(fragment, vector_N)
        else:
            whole_N = torch.empty(self._sizes[fragment], dtype=torch.float32, device=self.device)
        self._team.share([whole_N])
        return self._own(fragment, whole_N)

    def _quantised(self, fragment: int, chosen: TorchCodec, delta_N: Any) -> tuple[TorchParts, Any]:
        views = self._views()
        owns = ((tensor, delta_N[offset : offset + tensor.size]) for tensor, offset in self.layout[fragment])
        wholes = [whole_of(own.view(tensor.shape), views[tensor.name]).reshape(-1) for tensor, own in owns]
        parts, restored_N = super()._quantised(fragment, chosen, torch.cat(wholes))
        return parts, self._own(fragment, restored_N)

    def _own(self, fragment: int, whole_N: Any) -> Any:
        """Return this process's piece of a fragment that all processes have."""
        views = self._views()
        wholes = ((tensor, whole_N[offset : offset + tensor.size]) for tensor, offset in self._whole[fragment])
        return torch.cat([piece_of(one.view(tensor.shape), views[tensor.name]).reshape(-1) for tensor, one in wholes])


def _own_rows(rows: Rows, parameters: ModuleParameters) -> Rows:
    """Return this process's pieces of a fragment's tensors, with their offsets in its own vector."""
    offset, found, views = 0, [], parameters.views()
    for tensor, _ in rows:
        piece = Tensor(tensor.name, tuple(own_piece(views[tensor.name]).shape), tensor.kind)
        found.append((piece, offset))
        offset += piece.size
    return tuple(found)
