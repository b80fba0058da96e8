"""An island whose loop is in PyTorch, in virtual time: real but for the clock that paces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from archipelago.broker.manifest import Manifest
from archipelago.islands.own_loop.loop import OwnLoop
from archipelago.islands.pytorch.host import torch_host
from archipelago.islands.pytorch.module import ModuleParameters
from archipelago.islands.pytorch.replica import TorchReplica
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.snapshots import Arrival

#: Makes one training step of a run that is at that global step. Returns its tokens and its loss.
Train = Callable[[int], tuple[int, float]]


class TorchIsland(OwnLoop):
    """An island that `archipelago.pytorch.join` would make, for a clock that jumps: `boundary` and `advance` in turn.

    Attributes:
        scan_steps: Inner steps between two boundaries.
    """

    scan_steps = 1

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        parameters: ModuleParameters,
        train: Train,
        link: Link,
        arrivals: Sequence[Arrival],
        clock: Callable[[], float],
        incarnation: str,
    ) -> None:
        """Begin from published snapshots, which are written into the module.

        Args:
            name: The island's name.
            manifest: The run.
            parameters: The parameters of the module.
            train: Makes a training step of the module.
            link: The connection to the broker.
            arrivals: One snapshot of every fragment.
            clock: Seconds.
            incarnation: Distinguishes this island from earlier ones of the same name.
        """
        replica = TorchReplica(manifest, parameters.device)
        replica.begin(parameters.named(), [arrival.params_N for arrival in arrivals])
        host = torch_host(parameters.device, clock)
        super().__init__(name, manifest, link, replica, parameters, arrivals, host, None, clock, incarnation)
        self._train = train

    def boundary(self) -> None:
        """Adopt what has arrived, and send what is due."""
        super().boundary()
        self.beat("training")

    def advance(self) -> None:
        """Make one training step."""
        tokens, loss = self._train(self.ledger.global_step)
        self.count(1, tokens, loss)
