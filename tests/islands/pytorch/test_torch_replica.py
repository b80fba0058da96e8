"""The replica in PyTorch does what the one in JAX does, to the same bits."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from archipelago.broker.codecs import CODECS, Vector, body_of
from archipelago.broker.config import AdoptConfig, RunConfig, WireConfig
from archipelago.broker.manifest import NO_CORPUS, Manifest, Tensor
from archipelago.islands.sync.replica import Replica
from tests import pytorch
from tests.tiers import examples

torch = pytorch.required()

from archipelago.islands.pytorch.host import CopyStream  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.replica import TorchReplica  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("optimised")]

# Neither these numbers nor their differences are subnormal, because XLA on a CPU counts subnormals as zero.
ELEMENTS = st.just(0.0) | st.builds(math.copysign, st.floats(2.0**-40, 2.0**40, width=32), st.sampled_from([1.0, -1.0]))
VECTORS = st.lists(arrays(np.float32, 9, elements=ELEMENTS), min_size=4, max_size=4)
TENSORS = (Tensor("kernel", (2, 3)), Tensor("scale", (3,)))


def both(rule: Any, up: Any, first_N: Vector) -> tuple[Replica, dict[str, Any], TorchReplica, dict[str, Any]]:
    """Return both replicas of a run of one fragment, with their parameters."""
    config = RunConfig(adopt=AdoptConfig(rule=rule), wire=WireConfig(up=up))
    manifest = Manifest("own", config, TENSORS, (("kernel", "scale"),), NO_CORPUS, {})
    in_jax, in_torch = Replica(manifest), TorchReplica(manifest, torch.device("cpu"))
    tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in TENSORS}
    in_torch.begin(tensors, [first_N])
    return in_jax, in_jax.begin([first_N]), in_torch, tensors


@pytest.mark.parametrize("up", CODECS)
@pytest.mark.parametrize("rule", ["overwrite", "carry"])
@settings(max_examples=examples(50))
@given(vectors=VECTORS)
def test_both_send_and_adopt_the_same_bits(rule: Any, up: Any, vectors: list[Vector]) -> None:
    first_N, moved_N, new_N, then_N = vectors
    in_jax, params, in_torch, tensors = both(rule, up, first_N)
    for step_N in (moved_N, then_N):
        params = {name: value + jnp.asarray(part(step_N, name)) for name, value in params.items()}
        for name, tensor in tensors.items():
            tensor += torch.from_numpy(part(step_N, name).copy())
        assert body_of(in_torch.measure(0, tensors)) == body_of(in_jax.measure(0, params))
        params = in_jax.adopt(0, params, new_N)
        in_torch.adopt(0, tensors, new_N.copy())
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor.numpy(), np.asarray(params[name]))
        np.testing.assert_array_equal(in_torch.references[0].numpy(), np.asarray(in_jax.references[0]))


def part(vector_N: Vector, name: str) -> Vector:
    return vector_N[:6].reshape(2, 3) if name == "kernel" else vector_N[6:]


def test_an_adoption_does_not_change_what_arrived() -> None:
    """The link keeps the arrived vector, because the next difference builds on it."""
    _, _, in_torch, tensors = both("overwrite", "float32", np.zeros(9, np.float32))
    arrived_N = np.ones(9, np.float32)
    in_torch.adopt(0, tensors, arrived_N)
    tensors["scale"] += 5.0
    in_torch.measure(0, tensors)
    in_torch.adopt(0, tensors, np.full(9, 2.0, np.float32))
    assert arrived_N.tolist() == [1.0] * 9


class FakeStream(CopyStream):
    """A stream of a device whose memory is that of the host. It notes in which thread each copy was made."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, str]] = []

    def mark(self) -> Any:
        return "computed"

    def to_host(self, tensor: Any, after: Any) -> Any:
        assert after == "computed"
        self.copied.append(("to the host", threading.current_thread().name))
        return tensor.clone()

    def to_device(self, tensor: Any) -> Any:
        self.copied.append(("to the device", threading.current_thread().name))
        return tensor.clone()

    def use(self, tensor: Any) -> Any:
        self.copied.append(("used", threading.current_thread().name))
        return tensor


def test_the_threads_of_the_link_make_all_copies_of_a_device() -> None:
    copies, here = FakeStream(), threading.current_thread().name
    manifest = Manifest("own", RunConfig(), TENSORS, (("kernel", "scale"),), NO_CORPUS, {})
    replica = TorchReplica(manifest, torch.device("cpu"))
    replica._copies = copies
    tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in TENSORS}
    replica.begin(tensors, [np.zeros(9, np.float32)])
    tensors["scale"] += 1.0
    parts = replica.measure(0, tensors)
    assert not copies.copied
    with ThreadPoolExecutor(1, thread_name_prefix="link") as link:
        sent = link.submit(body_of, parts).result()
        assert link.submit(body_of, parts).result() == sent, "what is sent again is not copied again"
        prepared = link.submit(replica.prepare, 0, np.full(9, 3.0, np.float32)).result()
    replica.adopt(0, tensors, prepared)
    assert len(sent) == CODECS[replica.codec].encoded_size(9)
    torch.testing.assert_close(tensors["scale"], torch.full((3,), 3.0), atol=0.02, rtol=0.0)
    assert copies.copied == [("to the host", "link_0")] * len(parts) + [("to the device", "link_0"), ("used", here)]
