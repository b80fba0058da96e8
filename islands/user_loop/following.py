"""`archipelago.follow`, and how parameters from a run or a file come into the caller's own tree or module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenTensor, require_same_frozen
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.broker.process import Patience, connect_to
from archipelago.broker.redis.keys import checked_name
from archipelago.islands.sync.listener import Listener, Receiver
from archipelago.islands.user_loop.tensors import IsTrained, require_equal_tensors

if TYPE_CHECKING:
    from archipelago.islands.models.llama import Names

#: Parameters by name, float32.
Named = Mapping[str, NDArray[np.float32]]
#: Brings parameters to the form that the caller uses, and returns them.
Fill = Callable[[Named], Any]
Chosen = TypeVar("Chosen")


@dataclass(frozen=True)
class Published:
    """The tensors of a run, or of a file.

    Attributes:
        whose: The run or the file, in words.
        frozen: The tensors that are not trained.
    """

    whose: str
    run: str
    tensors: Sequence[Tensor]
    frozen: Sequence[FrozenTensor]

    @classmethod
    def of(cls, manifest: Manifest) -> Published:
        """Return the tensors of a run."""
        return cls(f"the run {manifest.run!r}", manifest.run, manifest.tensors, manifest.frozen)

    def filling(self, like: Any, names: Names | None = None) -> Fill:
        """Return the function that brings these parameters into `like`. Arguments and errors are as in `follow`."""
        if like is None:
            return lambda named: {name: values.copy() for name, values in named.items()}
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, torch.nn.Module):
            return self._filling_module(like, names)
        return self._filling_tree(like)

    def _filling_module(self, model: Any, names: Names | None) -> Fill:
        import torch

        from archipelago.islands.pytorch.module import ModuleParameters, unwrapped
        from archipelago.islands.pytorch.pieces import mesh_of

        inner, _ = unwrapped(model)
        if mesh_of(inner) is not None:
            raise _spread()
        parameters = self._chosen(lambda trained: ModuleParameters(model, trained, names))
        frozen = parameters.frozen_values()
        self._require_same(parameters.manifest_tensors(lambda name: "rest"), frozen)

        def fill(named: Named) -> Any:
            with torch.no_grad():
                for name, tensor in parameters.named().items():
                    tensor.copy_(torch.from_numpy(np.require(named[name], requirements="W")))
            return model

        return fill

    def _filling_tree(self, tree: Any) -> Fill:
        import jax

        from archipelago.islands.sync.arrays import own_copy, sharding_of
        from archipelago.islands.user_loop.parameters import frozen_values
        from archipelago.islands.user_loop.tree import TreeLayout

        layout = self._chosen(lambda trained: TreeLayout.of(tree, trained))
        if layout.is_spread:
            raise _spread()
        self._require_same(layout.tensors(lambda name: "rest"), frozen_values(layout))
        on_host = {name for name, leaf in layout.leaves_of(tree).items() if isinstance(leaf, np.ndarray)}

        def fill(named: Named) -> Any:
            leaves = {name: layout.own.get(name) for name in layout.names}
            for name, template in layout.templates.items():
                values = named[name].astype(template.dtype, order="C")
                leaves[name] = values if name in on_host else own_copy(values, sharding_of(template))
            return jax.tree.unflatten(layout.structure, leaves.values())

        return fill

    def _chosen(self, choose: Callable[[IsTrained], Chosen]) -> Chosen:
        """Return the tensors of a model that are here by name; all of them if there are none, for the error."""
        try:
            return choose({tensor.name for tensor in self.tensors}.__contains__)
        except ConfigError as error:
            if error.code != "loop.nothing":
                raise
            return choose(lambda name: True)

    def _require_same(self, own: Sequence[Tensor], frozen: Sequence[Any]) -> None:
        more = [] if self.frozen else [Tensor(values.name, values.shape) for values in frozen]
        require_equal_tensors(self.whose, self.tensors, [*own, *more], self.frozen, [values.name for values in frozen])
        require_same_frozen(self.run, self.frozen, [] if more else frozen)


def _spread() -> ConfigError:
    return ConfigError(
        "the parameters are spread over several processes, each of which would take a version of its own",
        "Give a model that is whole in each process. Islands of several processes get the run's parameters by `join`.",
        code="loop.sharded",
    )


def follow(
    url: str | None,
    name: str | None,
    like: Any = None,
    *,
    consistent: bool = True,
    names: Names | None = None,
    wait_seconds: float = 30.0,
) -> Listener:
    """Follow the parameters of a run while it trains, without taking part in it.

        for version in archipelago.follow(url, "mine", like=model):
            print(version.step, evaluate(model))

    It downloads the parameters once, and differences after that, in threads of its own. It writes nothing, so the role
    `viewer` suffices. It goes on after outages of Redis and of mergers, and ends with the run.

    Args:
        url: The URL of the Redis or of a replica of it, or the path of a join file; None for $ARCHIPELAGO_URL.
        name: The name of the run; None for $ARCHIPELAGO_RUN, or the only run there.
        like: A `torch.nn.Module`, whose parameters each version replaces in place; any pytree of arrays, of which each
            version makes a new one with these shardings and dtypes; or None for float32 arrays of numpy by name.
        consistent: Whether each version is the whole model after a whole cycle of rounds, in which each fragment was
            merged once. Otherwise each merged round makes a version.
        names: The names of the run where they are not those of a module, as in `archipelago.pytorch.join`.
        wait_seconds: How long to wait at the start for a Redis that does not answer.

    Returns:
        An iterator over versions, which waits for the next one. Its `newest()` does not wait.

    Raises:
        ConfigError: `like` has other tensors than the run (`loop.other-tensors`, `loop.other-frozen`), or is spread
            over processes (`loop.sharded`).
        BrokerError: The Redis cannot be reached, or has no such run.
    """
    patience = Patience(wait_seconds, lambda: False)
    transport = patience(lambda: connect_to(url, name and checked_name(name, "the run name")))
    try:
        manifest = patience(transport.reader.manifest)
        fill = Published.of(manifest).filling(like, names)
        receiver = Receiver(transport, manifest)
        receiver.pumps.start()
        return Listener(receiver, fill, consistent=consistent)
    except BaseException:
        transport.close()
        raise
