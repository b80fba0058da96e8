"""The membership of a user's script: what scripts in all frameworks add to a membership."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import Any

from archipelago.broker.codecs import Vector
from archipelago.broker.frozen import FrozenValues, require_same_frozen
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.broker.observe.logs import show_unless_set_up
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import Patience, connect_to
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import whole
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync.adoption import AnyReplica
from archipelago.islands.sync.connection.downloads import Arrival, require_same_run
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.evaluator import MERGED_SECONDS, Evaluator
from archipelago.islands.sync.membership import Membership
from archipelago.islands.sync.participant import Participant
from archipelago.islands.sync.recovery import OptimizerAccess
from archipelago.islands.sync.script import island_name
from archipelago.islands.user_loop.held_out import Evaluate, LoopEvaluator, checked_loss, require_evaluate
from archipelago.islands.user_loop.tensors import require_same_tensors

log = logging.getLogger(__name__)


class Session(Membership):
    """One membership of a script in a run. A framework sets the parameters and the state."""

    _parameters: Any
    _state: Any
    #: Whether newcomers may ask for the state.
    _gives_state: bool
    #: The names of parameters whose type is not merged.
    _unmerged: Collection[str] = ()
    _evaluator: LoopEvaluator | None = None
    #: How long to wait for the last rounds before the final evaluation.
    _merge_seconds = MERGED_SECONDS

    def __init__(
        self, url: str | None, run: str, island: str | None, wait_seconds: float, evaluate: Evaluate | None = None
    ) -> None:
        """Note what to join, as `join` was told. Nothing is contacted before the `with` begins."""
        require_evaluate(evaluate)
        self._evaluate = evaluate
        show_unless_set_up()
        super().__init__(
            run, lambda: island_name(url, island), lambda: connect_to(url, checked_name(run, "the run name")),
            Patience(wait_seconds, lambda: self._stop.has_arrived),
        )  # fmt: skip

    # -- what a framework adds ----------------------------------------------------------------------------------------

    @abstractmethod
    def _tensors(self, manifest: Manifest) -> Sequence[Tensor]:
        """Return the tensors that are merged. Their kinds do not matter."""

    @abstractmethod
    def _frozen(self) -> Sequence[FrozenValues]:
        """Return the tensors that are not trained."""

    @abstractmethod
    def _place(self, manifest: Manifest, vectors: Sequence[Vector]) -> AnyReplica:
        """Place the run's parameters, one vector for each fragment, and return the replica."""

    @abstractmethod
    def _begin_again(self, vectors: Sequence[Vector]) -> None:
        """Take the run's parameters, one vector for each fragment, once the island has left."""

    @abstractmethod
    def _device_name(self) -> str:
        """Return the name of the device that the island trains on."""

    @abstractmethod
    def _loss_of(self, vectors: Sequence[Vector]) -> Any:
        """Return what the script's function gives for the merged parameters, one vector for each fragment."""

    @abstractmethod
    def _use_state(self, state: Any) -> None:
        """Go on with the inner optimiser's state of a peer."""

    def _state_copies(self) -> Sequence[Any] | None:
        """Return copies of the inner optimiser's arrays for a newcomer; None if they are not there now."""
        return None if self._state is None else self._state.copies()

    def report(self, *, held_out: Any) -> None:
        """Record a held-out loss that the loop has measured itself, at the run's present step. It does not wait.

        `status`, the page and the report show the newest one. Use it where `join` has no `evaluate`, with any
        parameters. After the `with`, such as for those of `final`, it connects once more.

        Args:
            held_out: The mean loss, in the unit of the training loss: a number, or an array or tensor of one element.

        Raises:
            ConfigError: It is no finite number (`loop.argument`), or this is the wrong place for the call.
            BrokerError: Redis cannot be reached after the `with`.
        """
        loss = checked_loss(held_out, "`held_out`")
        if self._ended and self._loop is not None:
            with closing(self._connect()) as primary:
                manifest, ledger = self._loop.manifest, self._loop.ledger
                require_same_run(primary.reader, manifest)
                late = Evaluator(whole(primary, manifest), manifest, self._loop.link.who, None, list)
                late.report(loss, self._final_round or ledger.closed, self.step)
                late.send_reported()
            return
        loop = self._require_joined("report")
        self._evaluations(loop).report(loss, loop.ledger.closed, self.step)

    def _evaluations(self, loop: Participant) -> LoopEvaluator:
        if self._evaluator is None:
            self._evaluator = LoopEvaluator(loop.link, self._loss_of if self._evaluate else None)
            self._evaluator.start()
        return self._evaluator

    def _turn(self, steps: Any, tokens: Any, loss: Any) -> None:
        super()._turn(steps, tokens, loss)
        loop = self._loop
        if self._evaluate and loop is not None and not loop.finished and self._evaluations(loop).serve():
            loop.begin()  # the evaluation is no part of the next step's time

    def _end(self, state: str) -> None:
        if self._evaluate and self._evaluator is not None and state == "done":
            self._evaluator.stop()
            seconds = min(self._merge_seconds, MERGED_SECONDS)
            with progress("evaluating the final parameters"):
                self._evaluator.finish(lambda: self._stop.has_arrived, seconds, self._pause)

    def _close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.stop()
        super()._close()

    def final(self, timeout: float = 60.0) -> Any:
        """Leave the run, wait until its last rounds are merged, and take the run's own parameters.

        All islands get the same. If the run goes on when this island leaves, they are the newest, once this island's
        own contributions are merged. Call it when `finished` is true, in the `with` or after it; with several
        processes, in all of them.

        Args:
            timeout: How many seconds to wait.

        Returns:
            The parameters in JAX. None in PyTorch, where the model has them.

        Raises:
            ConfigError: This island still trains (`loop.left`), another run has the name (`island.other-run`), or a
                process of this island does not call it (`loop.not-together`, in PyTorch).
            BrokerError: The last rounds are not merged in time, as without a merger (`island.not-merged`), or Redis is
                away. A later call may succeed.
        """
        self._merge_seconds = timeout
        self._begin_again(self._final(timeout))
        return getattr(self, "params", None)

    # -- joining ------------------------------------------------------------------------------------------------------

    def _accept(self, transport: IslandTransport, manifest: Manifest, name: str) -> None:
        """Raise MismatchError unless the tensors that are trained, and those that are not, are those of the run."""
        tensors, frozen = self._tensors(manifest), self._frozen()
        require_same_tensors(manifest, tensors, [values.name for values in frozen], self._unmerged)
        if not (frozen or manifest.frozen):
            return
        with progress(f"comparing {len(frozen):,} frozen tensors with those of the run"):
            require_same_frozen(manifest.run, manifest.frozen, frozen)
        log.info("trains %s tensors; %s are frozen, as in the run", len(tensors), len(frozen))

    def _participant(self, name: str, manifest: Manifest, link: Link, arrivals: Sequence[Arrival]) -> Participant:
        replica = self._place(manifest, [arrival.params_N for arrival in arrivals])
        decode = self._state.decode if self._state is not None and self._state.can_travel else None
        optimizer = OptimizerAccess(self._state_copies if self._gives_state else None, decode, self._use_state)
        loop = Participant(
            name, manifest, link, replica, self._parameters, arrivals, self._device_name(), optimizer, link.clock,
            self._incarnation,
        )  # fmt: skip
        if getattr(self._state, "was_there", False):  # only PyTorch can tell
            loop.optimizer_origin = "the script's own"
        return loop
