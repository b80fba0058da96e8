"""What sessions in PyTorch add to those of `user_loop/test_session.py`: modules, and the state of their optimisers."""

from __future__ import annotations

import math
import subprocess
import sys
import uuid
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.wire import digest
from archipelago.islands.sync import recovery
from tests import pytorch
from tests.failing import failing

torch = pytorch.required()

from archipelago.islands.pytorch.state import OptimizerState  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import as_float32, module  # noqa: E402

SYNC = SyncConfig(interval=4, fragments=2)
KINDS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.fixture
def made() -> str:
    url = f"fakeredis://{uuid.uuid4().hex}"
    assert archipelago.pytorch.create(url, "own", module(), sync=SYNC, steps=1000)
    return url


@pytest.mark.full
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


def test_a_loss_that_the_script_adds_to_is_not_changed(made: str) -> None:
    total = torch.ones(())
    joined: Any = archipelago.pytorch.join(made, "own", module(), island="a")
    with joined as run:
        run.sync(loss=total)
        total += 5.0
        assert run._loop is not None
        assert run._loop.losses.take_mean() == 1.0


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
    return recovery.encode(recovery.StateForPeer("b/y", leaves, 5), "a/x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer_goes_on_as_the_giver_would(kind: str) -> None:
    for dtype in ("float32", "bfloat16"):
        giver, theirs, state = stepped(kind, 3, module(dtype))
        newcomer, ours, own = stepped(kind, 0, module(dtype))
        newcomer.load_state_dict(giver.state_dict())
        own.use(own.decode(*handover(state)))
        for model, optimizer in ((giver, theirs), (newcomer, ours)):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        for one, other in zip(giver.parameters(), newcomer.parameters(), strict=True):
            np.testing.assert_array_equal(as_float32(one), as_float32(other))


def test_the_state_of_a_peer_has_the_strides_of_the_parameters() -> None:
    """Fused kernels read both in the order of their memory."""
    convolutions = [torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in convolutions]
    giver, own = (
        OptimizerState([optimizer], dict(model.named_parameters()))
        for model, optimizer in zip(convolutions, optimizers, strict=True)
    )
    for state in (giver, own):
        state.rehearse()
    own.use(own.decode(*handover(giver)))
    (held,) = optimizers[1].state.values()
    assert held["exp_avg"].stride() == convolutions[1].weight.stride() != (27, 9, 3, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_device_of_the_script_changes_nothing(kind: str) -> None:
    """Numbers of a state and a state that has not begun are made on the host. Here the default device has no values."""
    _, _, state = stepped(kind, 0)
    before = [(entry.placeholder.dtype, entry.present()) for entry in state.entries]
    with torch.device("meta"):
        after = [(entry.placeholder.dtype, entry.present()) for entry in state.entries]
    assert [each for each, _ in after] == [each for each, _ in before]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(before, after, strict=True))


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


class Lazy(torch.optim.SGD):  # type: ignore[name-defined, misc]
    """An optimiser that makes its state in its first step, which it notes on itself."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        if not hasattr(self, "has_begun"):
            self.has_begun, self.state = True, {parameter: {"steps": 0} for parameter in parameters}
        for parameter in parameters:
            self.state[parameter]["steps"] += 1


def test_a_rehearsal_is_not_the_first_step_of_an_optimiser() -> None:
    model = module()
    optimizer, hooked = Lazy(model.parameters(), lr=0.1), list[str]()
    optimizer.register_step_pre_hook(lambda *_: hooked.append("before"))
    optimizer.register_step_post_hook(lambda *_: hooked.append("after"))
    states, groups = optimizer.state, optimizer.param_groups
    state = OptimizerState([optimizer], dict(model.named_parameters()))
    state.rehearse()
    assert state.can_travel
    assert optimizer.state is states == {}
    assert optimizer.param_groups is groups
    optimizer.step()
    assert [each["steps"] for each in optimizer.state.values()] == [1] * 6
    assert hooked == ["before", "after"], "of that step alone"


class Mastered(torch.optim.SGD):  # type: ignore[name-defined, misc]
    """An optimiser that trains copies of the parameters in float32, and writes them over the parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.state[parameter].setdefault("master", parameter.detach().float().clone())
                parameter.data.copy_(master.sub_(group["lr"] * parameter.grad.float()))


class Lagging(torch.optim.SGD):  # type: ignore[name-defined, misc]
    """An optimiser that draws the parameters to copies of them, as those without a schedule do."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.lerp_(self.state[parameter].setdefault("z", parameter.detach().clone()), 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimiser_that_undoes_merges_is_refused(dtype: str) -> None:
    model = module(dtype)
    for kind, is_refused in ((Mastered, True), (Lagging, False)):
        optimizer = kind(model.parameters(), lr=0.1)
        state = OptimizerState([optimizer], dict(model.named_parameters()))
        with pytest.raises(ConfigError, match="master weights") if is_refused else nullcontext():
            state.rehearse()
        assert not optimizer.state
        for one, other in zip(model.parameters(), module(dtype).parameters(), strict=True):
            np.testing.assert_array_equal(as_float32(one), as_float32(other))


def test_an_optimiser_is_refused_where_this_process_holds_nothing_of_the_largest_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2 splits the first dimension, which may be shorter than there are processes."""
    model = module()
    largest = max(model.parameters(), key=torch.numel).shape

    def own_piece(tensor: Any) -> Any:
        return tensor[:0] if tensor.shape == largest else tensor

    monkeypatch.setattr("archipelago.islands.pytorch.state.own_piece", own_piece)
    with failing(ConfigError, "loop.argument"):
        OptimizerState([Mastered(model.parameters(), lr=0.1)], dict(model.named_parameters())).rehearse()


def test_a_rehearsal_that_fails_keeps_gradients_and_gives_no_state() -> None:
    model = module()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    given, broken = KINDS["AdamW"](model.parameters()), torch.optim.LBFGS(model.parameters())
    state = OptimizerState([given, broken], dict(model.named_parameters()))
    state.rehearse()
    assert not given.state
    assert all(bool((parameter.grad == 0.5).all()) for parameter in model.parameters())
    assert state.copies() is None


def test_state_whose_layout_changes_is_given_no_more(caplog: pytest.LogCaptureFixture) -> None:
    changes: list[dict[str, Any]] = [
        {"exp_avg": torch.zeros(3, 3)},
        {"exp_avg": torch.zeros(4, dtype=torch.bfloat16)},
        {"exp_avg": [torch.zeros(4)]},
        {"step": 3},
        {"preconditioner": torch.eye(2)},
    ]
    for changed in changes:
        caplog.clear()
        model, optimizer, state = stepped("AdamW", 2)
        assert state.copies() is not None
        optimizer.state[model[2].bias].update(changed)
        for _ in range(2):
            assert state.copies() is None
        assert len(caplog.records) == 1, changed


def test_state_that_a_script_has_loaded_is_given() -> None:
    _, optimizer, state = stepped("AdamW", 2)
    optimizer.load_state_dict(optimizer.state_dict())
    assert state.copies() is not None


def test_state_that_belongs_to_no_parameter_stays_the_islands_own() -> None:
    _, optimizer, state = stepped("AdamW", 2)
    optimizer.state["steps"] = 2
    assert stepped("AdamW", 0)[2].decode(*handover(state))


def test_the_state_of_another_optimiser_is_refused() -> None:
    about, payload = handover(stepped("AdamW", 2)[2])
    with failing(WireError, "handover.shape"):
        stepped("SGD", 0)[2].decode(about, payload)
    with failing(WireError, "handover.unsound"):
        stepped("AdamW", 0)[2].decode(replace(about, digest=digest(b"")), payload)


def test_state_that_no_steps_can_produce_is_refused() -> None:
    for key, value, code in (
        ("exp_avg_sq", -1.0, "handover.unsound"),
        ("step", -1.0, "handover.unsound"),
        ("step", 2.0**40, "handover.unsound"),
        ("exp_avg", 1e6, "handover.unsound"),
        ("exp_avg", math.nan, "handover.unsound"),
    ):
        model, optimizer, state = stepped("AdamW", 2)
        optimizer.state[model[2].bias][key].fill_(value)
        with failing(WireError, code):
            stepped("AdamW", 0)[2].decode(*handover(state))
