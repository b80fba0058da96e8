"""`archipelago.create` and `archipelago.join`: a JAX training script becomes an island of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.typing import ArrayLike

from archipelago.broker.codecs import Vector
from archipelago.broker.config import AdoptConfig, MergeConfig, OuterConfig, SyncConfig, WireConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.islands.sync.replica import Replica
from archipelago.islands.user_loop.held_out import Evaluate
from archipelago.islands.user_loop.new_run import create_run, settings
from archipelago.islands.user_loop.parameters import LoopState, TreeParameters, frozen_values, require_values
from archipelago.islands.user_loop.session import Session
from archipelago.islands.user_loop.tensors import EMBEDDINGS, KindOf, Trained, kinds_by
from archipelago.islands.user_loop.tree import PyTree, TreeLayout, host_vector

if TYPE_CHECKING:
    from archipelago.islands.user_loop.parallel import Follower


def create(
    url: str | None,
    name: str,
    params: PyTree,
    *,
    steps: int,
    sync: SyncConfig | None = None,
    merge: MergeConfig | None = None,
    outer: OuterConfig | None = None,
    adopt: AdoptConfig | None = None,
    wire: WireConfig | None = None,
    kinds: str | KindOf = EMBEDDINGS,
    trained: Trained | None = None,
    record: bool = False,
    shards: int = 1,
    wait_seconds: float = 30.0,
) -> bool:
    """Create a run for training scripts in JAX, which then `join` it. Its first parameters are those given.

    Args:
        url: The URL of the Redis (redis://HOST:PORT); None for $ARCHIPELAGO_URL.
        name: The name of the run.
        params: A tree of arrays: a dictionary, an `nnx.State`, or any other pytree with names. Leaves of float32,
            bfloat16 and float16 are merged, in float32. Those that are not floating-point stay each island's own. If
            its arrays are spread over the processes of `jax.distributed`, all of them call this.
        steps: The length of the run in global inner steps, which count the steps of the fastest island.
        sync: How often islands contribute.
        merge: The rules that merge the contributions of a round.
        outer: The outer optimiser.
        adopt: How an island takes a snapshot.
        wire: The codecs.
        kinds: Which tensors are embeddings, for which `merge` has a rule of its own: a regular expression that is found
            in their names, or a function from a name to "embedding" or "rest".
        trained: Which leaves are trained: a regular expression that is found in their names, such as "lora", or a
            function from a name to a boolean. The other weights are frozen: `join` compares them by digest, and they
            are never sent. None trains all floating-point leaves.
        record: Keep all payloads, so that `archipelago replay` can merge the rounds again.
        shards: How many mergers share the work, for a model that is too large for one. One process serves all shards
            until others come.
        wait_seconds: How long to wait for a Redis that does not answer.

    Returns:
        Whether this call created it: False if the run exists with these tensors and settings.

    Raises:
        ConfigError: The tree cannot be merged (`loop.nothing`, `loop.unnamed`, `loop.dtype`), `trained` does not fit it
            (`loop.argument`), the Redis is too small (`loop.too-large`), islands of a lost run of that name live
            (`init.islands-live`), or there are more shards than fragments (`config.value`).
        MismatchError: The run exists with other tensors (`loop.other-tensors`) or settings (`config.other-settings`).
        DivergedError: A leaf holds NaN or infinity (`loop.not-finite`).
        BrokerError: The Redis cannot be reached.
    """
    config = settings(steps, record=record, sync=sync, merge=merge, outer=outer, adopt=adopt, wire=wire)
    layout = TreeLayout.of(params, trained)
    leaves = layout.leaves_of(params)
    for leaf, values in leaves.items():
        require_values(leaf, values)
    tensors = layout.tensors(kinds_by(kinds))
    made = partial(create_run, url, name, config, shards, tensors, wait_seconds=wait_seconds, unmerged=layout.unmerged)
    if layout.is_spread:
        from archipelago.islands.user_loop.parallel import create_spread

        return create_spread(layout, params, made, f"create {name}")
    return made(lambda leaf: host_vector(leaves[leaf]), partial(frozen_values, layout))


@dataclass(frozen=True)
class Joining:
    """What a script gives to `join`, whose docstring describes it. All processes of one island give the same."""

    url: str | None
    run: str
    params: PyTree
    state: PyTree | Callable[[], PyTree] = None
    trained: Trained | None = None
    island: str | None = None
    wait_seconds: float = 30.0
    evaluate: Evaluate | None = None

    def newest_state(self) -> Callable[[], Any] | None:
        """Return the function that returns the newest state of the optimiser, if the script gives it."""
        state = self.state
        return state if state is None or callable(state) else lambda: state


class JoinedRun(Session):
    """A run that a JAX script has joined, as `join` returns it. Use it as a context manager.

    Attributes:
        params: The newest parameters, in the tree, shardings and dtypes that `join` was given.
        state: The inner optimiser's state to begin with: a peer's, or the one that `join` was given.
    """

    _parameters: TreeParameters
    _state: LoopState | None
    _replica: Replica

    def __init__(self, given: Joining) -> None:
        super().__init__(given.url, given.run, given.island, given.wait_seconds, given.evaluate)
        self._parameters = TreeParameters(given.params, given.trained)
        self._gives_state = callable(given.state)
        self._newest_state, self._state = given.newest_state(), None
        self._given: Any = None
        self.state: Any = None

    @property
    def params(self) -> Any:
        """The parameters: those of the run at first, then those that `sync` returned last."""
        return self._parameters.tree

    def sync(
        self, params: PyTree, *, tokens: int | None = None, loss: ArrayLike | None = None, steps: int = 1
    ) -> PyTree:
        """Sync between two steps, and return the parameters to train on with. It never waits for the run.

        Most calls do nothing and return `params` itself. Now and then a fragment is sent, or arrives.

        Args:
            params: What the step returned, in the tree of `run.params`. Leave arrays of numpy in it unchanged until the
                next `sync`: what the run has not got yet is sent from them when the island leaves.
            tokens: What these steps trained on, in tokens, examples or any other unit that all islands of the run
                share. An island's weight in a round follows from it. The default counts steps.
            loss: The loss of these steps, for display: a number, or an array that the device still computes.
            steps: How many inner steps this call stands for.

        Raises:
            ConfigError: The parameters are not those of the run, or this is the wrong place for the call.
            DivergedError: A parameter or the loss is not finite.
        """
        self._given = params
        self._turn(steps, tokens, loss)
        return self._parameters.tree

    def _turn(self, steps: Any, tokens: Any, loss: Any) -> None:
        self._require_joined()
        before, given, self._given = self._parameters.tree, self._given, None
        try:
            self._parameters.offer(given)
            super()._turn(steps, tokens, loss)
        except ConfigError:
            self._parameters.keep(before)  # the island can still leave with what it has
            raise

    # -- what JAX adds to a session -----------------------------------------------------------------------------------

    def _new_state(self, newest: Callable[[], Any]) -> LoopState:
        return LoopState(newest)

    def _new_replica(self, manifest: Manifest) -> Replica:
        return Replica(manifest, self._parameters.layout.templates)

    def _tensors(self, manifest: Manifest) -> Sequence[Tensor]:
        self._parameters.choose(manifest)
        self._unmerged = self._parameters.layout.unmerged
        return self._parameters.layout.tensors(lambda name: "rest")

    def _frozen(self) -> Sequence[FrozenValues]:
        return frozen_values(self._parameters.layout)

    def _place(self, manifest: Manifest, vectors: Sequence[Vector]) -> Replica:
        self._replica = self._new_replica(manifest)
        self._parameters.start(self._replica.begin(list(vectors)))
        if self._newest_state is not None:
            self._state = self._new_state(self._newest_state)
            self.state = self._state.newest()
        return self._replica

    def _begin_again(self, vectors: Sequence[Vector]) -> None:
        self._parameters.start(self._replica.begin(list(vectors)))
        self._replica.references.clear()  # nothing is measured any more

    def _device_name(self) -> str:
        return str(jax.devices()[0].device_kind)

    def _warm_up(self) -> None:
        self._replica.warm_up(self._parameters.named())

    def _loss_of(self, vectors: Sequence[Vector]) -> Any:
        assert self._evaluate is not None  # noqa: S101 - only islands with one are asked
        return self._evaluate(self._parameters.tree_with(self._replica.merged(vectors)))

    def _use_state(self, state: Any) -> None:
        if self._state is not None:
            self.state = self._state.taken(state)


def join(
    url: str | None,
    name: str,
    params: PyTree,
    *,
    state: PyTree | Callable[[], PyTree] = None,
    trained: Trained | None = None,
    island: str | None = None,
    wait_seconds: float = 30.0,
    evaluate: Evaluate | None = None,
) -> JoinedRun | Follower:
    """Make a training script in JAX an island of a run.

        with join(url, "mine", params, state=lambda: opt_state) as run:
            params = run.params
            for batch in loader:
                params, opt_state, loss = train_step(params, opt_state, batch)
                params = run.sync(params, tokens=batch.size, loss=loss)
                if run.finished:
                    break

    Args:
        url: The URL of the Redis (redis://HOST:PORT), or the path of a join file; None for $ARCHIPELAGO_URL.
        name: The name of the run, which `create` has made.
        params: A tree of arrays. The run's parameters come back in its shapes, shardings and dtypes. Its values do not
            matter, but for those of frozen leaves, which must be those of the run. If its arrays are spread over the
            processes of `jax.distributed`, all of them call this, and are one island.
        state: A function that returns the newest state of the inner optimiser. This island takes such state from a
            peer, as `run.state`, and gives its own to newcomers. A value instead of a function is never given, because
            it would be old. None keeps states apart.
        trained: Which leaves are trained, as in `create`. None for those of the run.
        island: The name of this island. One that stays the same over restarts continues its counts. The default is
            that of the join file, or a random one.
        wait_seconds: How long to wait at the start for a Redis that does not answer.
        evaluate: A function that gets the merged parameters, in the tree of `run.params`, and returns their mean loss
            on held-out data. One island at a time calls it, in `sync`: at most every 15 s, for at most 2 % of its
            time, and once at the end of the run. If it fails, the island trains on and another one evaluates.

    Raises:
        ConfigError: The tree has no floating-point leaf, or a leaf without a name, or `trained` does not fit it, or
            `evaluate` takes no argument (`loop.argument`).
    """
    given = Joining(url, name, params, state, trained, island, wait_seconds, evaluate)
    if not TreeLayout.of(params, trained).is_spread:
        if (processes := jax.process_count()) > 1:
            raise ConfigError(
                f"this is one of {processes} processes that `jax.distributed` connects, and the parameters are on this "
                "one alone",
                "Put them on a mesh of all devices: NamedSharding(mesh, PartitionSpec()) keeps an array whole on each. "
                "To make each process an island of its own, do not connect them.",
                code="loop.sharded",
            )
        return JoinedRun(given)
    from archipelago.islands.user_loop.parallel import joined

    return joined(given)
