"""What loops in PyTorch add to those of `user_loop/test_loop.py`: modules that are trained in place."""

from __future__ import annotations

from typing import Any

from archipelago.broker.errors import ConfigError
from tests import pytorch
from tests.failing import failing

torch = pytorch.required()

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing  # noqa: E402

from archipelago.islands.pytorch.module import ModuleParameters  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import TorchRun, module  # noqa: E402


def test_parameters_keep_their_identity_and_buffers_stay() -> None:
    run = TorchRun()
    names = ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "3.bias"]  # the last layer shares the first weight
    assert [tensor.name for tensor in run.manifest.tensors] == names
    island = run.island()
    before = dict(island.model.named_parameters())
    island.model[1].running_mean.fill_(7.0)
    island.train(9)
    assert run.merger.state.closed
    after = dict(island.model.named_parameters())
    assert list(before) == list(after) == names
    assert all(after[name] is before[name] for name in before)
    assert island.model[3].weight is island.model[0].weight
    assert all(parameter.requires_grad for parameter in after.values())
    assert island.model[1].running_mean.tolist() == [7.0] * 4


def test_names_are_those_of_the_module_inside_of_wrappers() -> None:
    checkpointed = module()
    apply_activation_checkpointing(checkpointed)
    for wrapped in (torch.nn.DataParallel(module()), torch.compile(module(), backend="eager"), checkpointed):
        assert ModuleParameters(wrapped).tensors.keys() == ModuleParameters(module()).tensors.keys()


def with_bias(bias: Any) -> Any:
    model = module()
    model[2].bias = bias
    return model


def test_what_cannot_be_merged_is_named() -> None:
    nothing = [
        torch.nn.ReLU(), torch.nn.ParameterList([torch.nn.Parameter(torch.arange(4), requires_grad=False)]),
        module().requires_grad_(False),
    ]  # fmt: skip
    elsewhere = type("Elsewhere", (torch.nn.Parameter,), {"device": torch.device("cuda", 1)})
    wrongs = [
        (with_bias(torch.nn.Parameter(torch.zeros(4, device="meta"))), "loop.meta", "'2.bias'"),
        (with_bias(torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))), "loop.dtype", "'2.bias'"),
        (with_bias(torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))), "loop.dtype", "'2.bias'"),
        (with_bias(elsewhere(torch.zeros(4))), "loop.sharded", "'2.bias'"),
        (torch.nn.Sequential(torch.nn.LazyLinear(3)), "loop.meta", "'0.weight'"),
        *((model, "loop.nothing", "") for model in nothing),
    ]
    for model, code, named in wrongs:
        with failing(ConfigError, code) as caught:
            ModuleParameters(model)
        assert named in caught.value.what


def _replaced(model: Any) -> None:
    model[2].bias = torch.nn.Parameter(torch.zeros(4))


def _of_another_shape(model: Any) -> None:
    model[2].bias.data = torch.zeros(5)


def _halved(model: Any) -> None:
    model[2].half()


def _removed(model: Any) -> None:
    model[2].bias = None


def _added(model: Any) -> None:
    model.append(torch.nn.Linear(4, 4))


def test_a_parameter_that_changed_since_the_join_is_named() -> None:
    run = TorchRun()
    changes = [(_replaced, "2.bias"), (_removed, "2.bias"), (_of_another_shape, "2.bias"), (_halved, "2.weight"),
               (_added, "added since `join`")]  # fmt: skip
    for number, (change, named) in enumerate(changes):
        island = run.island(str(number))
        change(island.model)
        with failing(ConfigError, "loop.other-tree") as caught:
            for _ in range(8):
                island.turn()
        assert named in caught.value.what
