"""`archipelago.pytorch.create` and `join`, as a script calls them, on a server in memory."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.broker.errors import ConfigError, DivergedError, MismatchError, UnknownRunError, WireError
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Memory
from archipelago.broker.wire import digest
from archipelago.islands.own_loop.tensors import EMBEDDINGS
from archipelago.islands.sync import recovery
from tests import pytorch
from tests.conftest import Until
from tests.failing import failing
from tests.islands.own_loop.any_framework import served

torch = pytorch.required()

from archipelago.islands.pytorch.state import OptimizerState  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import as_float32, module, trained  # noqa: E402

pytestmark = pytest.mark.full

SYNC = SyncConfig(interval=4, fragments=2)
KINDS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


@pytest.fixture
def made(url: str) -> str:
    assert archipelago.pytorch.create(url, "own", module(), sync=SYNC, steps=1000, kinds="^0")
    return url


def test_a_pytorch_island_imports_no_jax(tmp_path: Any) -> None:
    code = """
import sys, torch, archipelago
model = torch.nn.Linear(2, 2)
archipelago.pytorch.create("fakeredis://x", "own", model, steps=4)
with archipelago.pytorch.join("fakeredis://x", "own", model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    run.sync(loss=torch.tensor(1.0))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "flax", "optax", "orbax"}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == "[]"


def test_create_publishes_the_module_and_join_takes_it(made: str) -> None:
    manifest = connect(made, "own").reader.manifest()
    assert {t.name: t.kind for t in manifest.tensors}["0.weight"] == "embedding"
    assert not archipelago.pytorch.create(made, "own", module(), sync=SYNC, steps=1000, kinds="^0")
    model = module()
    trained(model, 5.0)
    with archipelago.pytorch.join(made, "own", model, island="a") as run:
        run.sync(tokens=3, loss=torch.tensor(2.0, dtype=torch.bfloat16))
        for one, other in zip(model.parameters(), module().parameters(), strict=True):
            np.testing.assert_array_equal(as_float32(one), as_float32(other))
    with failing(ConfigError, "loop.left"):
        run.sync()


def test_embeddings_are_found_as_in_jax() -> None:
    assert signature(archipelago.pytorch.create).parameters["kinds"].default == EMBEDDINGS


def test_another_model_is_refused_with_the_difference(made: str) -> None:
    other = torch.nn.Sequential(*module()[:3], torch.nn.Linear(4, 9))
    joined = archipelago.pytorch.join(made, "own", other)
    with failing(MismatchError, "loop.other-tensors") as caught, joined:
        pass
    assert "3.bias" in caught.value.what


def test_a_loss_that_the_script_adds_to_is_not_changed(made: str) -> None:
    total = torch.ones(())
    with archipelago.pytorch.join(made, "own", module(), island="a") as run:
        run.sync(loss=total)
        total += 5.0
        assert run._loop is not None
        assert run._loop.losses.take_mean() == 1.0


def test_what_is_no_number_is_one_error(made: str) -> None:
    with archipelago.pytorch.join(made, "own", module(), island="a") as run:
        for tokens in ("x", math.nan, -1, 1 << 40, torch.ones(2), torch.tensor(math.nan)):
            with failing(ConfigError, "loop.tokens"):
                run.sync(tokens=tokens)
        for loss in ("x", torch.ones(0), torch.ones(1, dtype=torch.complex64), [1.0]):
            with failing(ConfigError, "loop.loss"):
                run.sync(loss=loss)
        run.sync(tokens=torch.tensor(3.0), loss=torch.tensor(1))
        assert run._loop is not None
        assert run._loop.totals.tokens == 3


def test_sync_belongs_to_the_thread_and_the_time_of_the_membership(made: str) -> None:
    caught: list[str] = []

    def elsewhere() -> None:
        for call in (run.sync, run.leave):
            try:
                call()
            except ConfigError as error:
                caught.append(error.code)

    model = module()
    with archipelago.pytorch.join(made, "own", model, island="a") as run:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        trained(model)
        run.sync()
        run.leave()
        assert run.finished
        with failing(ConfigError, "loop.left"):
            run.sync()
    assert caught == ["loop.other-thread"] * 2
    assert connect(made, "own").reader.books().published == 2, "nothing was lost"


def test_one_model_cannot_be_in_two_runs(made: str) -> None:
    assert archipelago.pytorch.create(made, "other", module(), sync=SYNC, steps=1000)
    model = module()
    with archipelago.pytorch.join(made, "own", model):
        joined = archipelago.pytorch.join(made, "other", model)
        with failing(ConfigError, "loop.two-runs") as caught, joined:
            pass
        assert "'0.weight'" in caught.value.what
        with archipelago.pytorch.join(made, "other", module()):
            pass


def test_nothing_is_sent_to_a_redis_that_cannot_hold_the_model(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(connect(url, "own").reader)
    monkeypatch.setattr(kind, "memory", lambda self: Memory(used=1 << 20, limit=0, machine=2 << 20))
    with failing(ConfigError, "loop.too-large") as caught:
        archipelago.pytorch.create(url, "own", torch.nn.Linear(512, 512), steps=10)
    assert "262,656" in caught.value.what
    with failing(UnknownRunError, "broker.unknown-run"):
        connect(url, "own").reader.manifest()


def test_a_first_parameter_that_is_not_finite_is_named(url: str) -> None:
    model = module()
    with torch.no_grad():
        model[2].bias[1] = math.nan
    with failing(DivergedError, "loop.not-finite") as caught:
        archipelago.pytorch.create(url, "own", model, steps=10)
    assert "'2.bias'" in caught.value.what


# -- the optimiser's state ------------------------------------------------------------------------------------------


def stepped(kind: str, steps: int, model: Any = None) -> tuple[Any, Any, OptimizerState]:
    """Return a module, its optimiser after some steps, and the optimiser's state."""
    model = module() if model is None else model
    optimizer = KINDS[kind](model.parameters())
    state = OptimizerState([optimizer], dict(model.named_parameters()))
    state.rehearse()
    torch.manual_seed(steps)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer, state


def handover(state: OptimizerState) -> tuple[Any, bytes]:
    leaves = state.copies()
    assert leaves is not None
    return recovery.encode(recovery.StateForPeer("b/y", leaves, 3, 5), "a/x")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer_goes_on_as_the_giver_would(kind: str, dtype: str) -> None:
    giver, theirs, state = stepped(kind, 3, module(getattr(torch, dtype)))
    newcomer, ours, own = stepped(kind, 0, module(getattr(torch, dtype)))
    newcomer.load_state_dict(giver.state_dict())
    own.use(own.decode(*handover(state)))
    for model, optimizer in ((giver, theirs), (newcomer, ours)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for one, other in zip(giver.parameters(), newcomer.parameters(), strict=True):
        np.testing.assert_array_equal(as_float32(one), as_float32(other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_leaves_nothing_behind(kind: str) -> None:
    model = module()
    optimizer = KINDS[kind](model.parameters())
    before = [float(group["lr"]) for group in optimizer.param_groups]
    keys = {len(state) for state in optimizer.state.values()}  # Adagrad has state from the beginning
    OptimizerState([optimizer], dict(model.named_parameters())).rehearse()
    assert {len(state) for state in optimizer.state.values()} == keys
    assert [float(group["lr"]) for group in optimizer.param_groups] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    for one, other in zip(model.parameters(), module().parameters(), strict=True):
        np.testing.assert_array_equal(as_float32(one), as_float32(other))


class Adaptive(torch.optim.SGD):  # type: ignore[name-defined, misc]
    """An optimiser that keeps state in its groups, as those that estimate their learning rate do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["estimate"] += 1.0
            group["history"].append(group["k"])
        return super().step(closure)


def test_a_rehearsal_restores_all_options_of_an_optimiser() -> None:
    model = module()
    optimizer = Adaptive(model.parameters(), lr=0.1, momentum=0.9)
    for group in optimizer.param_groups:
        group |= {"estimate": torch.ones(()), "history": []}
    state = OptimizerState([optimizer], dict(model.named_parameters()))
    state.rehearse()
    assert state.can_travel
    (group,) = optimizer.param_groups
    assert "k" not in group
    assert (float(group["estimate"]), group["history"], group["lr"]) == (1.0, [], 0.1)


def test_a_rehearsal_that_fails_keeps_gradients_and_leaves_no_state() -> None:
    model = module()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    given, broken = KINDS["AdamW"](model.parameters()), torch.optim.LBFGS(model.parameters())
    OptimizerState([given, broken], dict(model.named_parameters())).rehearse()
    assert not given.state
    assert all(bool((parameter.grad == 0.5).all()) for parameter in model.parameters())


def test_an_optimiser_that_needs_a_closure_keeps_its_state() -> None:
    model = module()
    state = OptimizerState([torch.optim.LBFGS(model.parameters())], dict(model.named_parameters()))
    state.rehearse()
    assert state.copies() is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_value_that_the_giver_does_not_have_yet_is_zero() -> None:
    _, optimizer, state = stepped("AdamW", 1)
    optimizer.state.popitem()
    _, ours, own = stepped("AdamW", 0)
    own.use(own.decode(*handover(state)))
    assert len(ours.state) == len(optimizer.state) + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(exp_avg=torch.zeros(3, 3)),
        lambda state: state.update(exp_avg=state["exp_avg"].bfloat16()),
        lambda state: state.update(exp_avg=[state["exp_avg"]]),
        lambda state: state.update(step=3),
        lambda state: state.update(preconditioner=torch.eye(2)),
    ],
    ids=["shape", "dtype", "list", "number", "more"],
)
def test_state_whose_layout_changes_is_given_no_more(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, state = stepped("AdamW", 2)
    assert state.copies() is not None
    change(optimizer.state[model[2].bias])
    for _ in range(2):
        assert state.copies() is None
    assert len(caplog.records) == 1


def test_state_that_numpy_does_not_have_is_not_given() -> None:
    class Narrow(torch.optim.SGD):  # type: ignore[name-defined, misc]
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["narrow"] = torch.zeros(3, dtype=torch.float8_e4m3fn)

    model = module()
    state = OptimizerState([Narrow(model.parameters())], dict(model.named_parameters()))
    state.rehearse()
    assert state.copies() is None


def test_an_optimiser_of_another_model_is_refused() -> None:
    with failing(ConfigError, "loop.optimizer"):
        archipelago.pytorch.join("fakeredis://x", "own", module(), KINDS["SGD"](module().parameters()))


def test_the_state_of_another_optimiser_is_refused() -> None:
    about, payload = handover(stepped("AdamW", 2)[2])
    with failing(WireError, "handover.shape"):
        stepped("SGD", 0)[2].decode(about, payload)
    with failing(WireError, "handover.digest"):
        stepped("AdamW", 0)[2].decode(replace(about, digest=digest(b"")), payload)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("exp_avg_sq", -1.0, "handover.unsound"),
        ("step", -1.0, "handover.unsound"),
        ("step", 2.0**40, "handover.unsound"),
        ("exp_avg", 1e6, "handover.unsound"),
        ("exp_avg", math.nan, "handover.not-finite"),
    ],
)
def test_state_that_no_steps_can_produce_is_refused(key: str, value: float, code: str) -> None:
    model, optimizer, state = stepped("AdamW", 2)
    optimizer.state[model[2].bias][key].fill_(value)
    with failing(WireError, code):
        stepped("AdamW", 0)[2].decode(*handover(state))


def test_an_island_takes_the_state_of_a_peer(made: str, until: Until) -> None:
    stopped = threading.Event()

    def train() -> None:
        model = module()
        optimizer = KINDS["AdamW"](model.parameters())
        with archipelago.pytorch.join(made, "own", model, optimizer, island="giver") as run:
            while not stopped.wait(0.005):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                run.sync(loss=1.0)

    thread = threading.Thread(target=train)
    with served(made) as merger:
        thread.start()
        try:
            until(lambda: merger.state.closed > 2, "the first rounds")
            model = module()
            optimizer = KINDS["AdamW"](model.parameters())
            with archipelago.pytorch.join(made, "own", model, optimizer, island="new") as run:
                assert run.moments == "peer giver"
                steps = {float(state["step"]) for state in optimizer.state.values()}
                assert len(steps) == 1
                assert steps.pop() >= 4.0
        finally:
            stopped.set()
            thread.join()
