"""Powers of singular values: against a float64 SVD, for degenerate matrices, and to the same bits on other machines."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import tracemalloc
from itertools import product as product_of
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.broker.wire import encoded
from archipelago.merger import merge_rules, spectra, spectra_trial
from archipelago.merger.spectra import (
    FLOOR,
    Factor,
    Matrix,
    Power,
    Products,
    Spectra,
    default_threads,
    memory,
    operations,
    with_power,
)
from archipelago.merger.spectra_trial import has_same_bits
from archipelago.merger.weights import Group, cycle_work, spectra_bytes
from archipelago.merger.xla_spectra import on_device
from tests.pytorch import required
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("optimised")

ROOT = Path(__file__).resolve().parents[2]
EXPONENTS = (0.0, 0.5)
#: The largest error of a singular value from FLOOR on, as a share of the largest result. That of 28,000 random matrices
#: was 5.9e-3.
ERROR_MAX = 8e-3
Wide = NDArray[np.float64]

SIDES = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)
POWERS = st.sampled_from(EXPONENTS)


def rotation(size: int, random: np.random.Generator) -> Wide:
    return np.linalg.qr(random.standard_normal((size, size)))[0]


def made(rows: int, columns: int, seed: int, smallest: float = 0.0) -> NDArray[np.float32]:
    """Return a matrix whose singular values lie between that share of the largest and the largest."""
    random = np.random.default_rng(seed)
    side = min(rows, columns)
    values = np.concatenate([[1.0], smallest ** random.random(side - 1) if smallest else random.random(side - 1)])
    out: Wide = rotation(rows, random)[:, :side] * values @ rotation(columns, random)[:side]
    return out.astype(np.float32)


def in_float64(matrix_RC: NDArray[np.float32], exponent: float) -> tuple[Wide, Wide]:
    """Return U Sᵖ Vᵀ with the damping of small singular values, where the largest is one; and the singular values."""
    left, values, right = np.linalg.svd(matrix_RC.astype(np.float64), full_matrices=False)
    shares = values / values[0]
    floor = FLOOR * bound_of(matrix_RC) if exponent else 0.0
    powers = shares * (shares**2 + floor**2) ** ((exponent - 1) / 2)
    return left * powers / powers[0] @ right, shares


def bound_of(matrix_RC: NDArray[np.float32]) -> float:
    """Return the bound of the largest singular value that the spectrum is scaled by, as a multiple of it."""
    wide = matrix_RC.astype(np.float64)
    square = np.linalg.matrix_power(wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide, 2)
    return float(np.abs(square).sum(axis=1).max() ** 0.25 / np.linalg.norm(wide, 2))


def largest_error(found: NDArray[np.floating[Any]], expected: Wide) -> float:
    """Return the spectral norm of the difference, after scaling `found` to the size of `expected`."""
    scale = np.vdot(found, expected) / np.vdot(found, found)
    return float(np.linalg.norm(scale * found - expected, 2))


@settings(max_examples=examples(100))
@given(SIDES, SIDES, SEEDS, POWERS)
def test_singular_values_are_those_of_a_float64_svd(rows: int, columns: int, seed: int, exponent: float) -> None:
    matrix_RC = made(rows, columns, seed, smallest=2 * FLOOR)
    expected, shares = in_float64(matrix_RC, exponent)
    assert shares[-1] > FLOOR
    assert largest_error(with_power(matrix_RC, exponent), expected) <= ERROR_MAX


def test_degenerate_matrices() -> None:
    """A matrix of zeros stays one, and one of rank one keeps its direction."""
    for shape, exponent in product_of(((5, 3), (3, 5), (1, 4), (4, 1), (1, 1), (40, 40)), EXPONENTS):
        assert not with_power(np.zeros(shape, np.float32), exponent).any()
        random = np.random.default_rng(0)
        one = np.outer(random.standard_normal(shape[0]), random.standard_normal(shape[1])).astype(np.float32)
        one /= np.linalg.norm(one)
        for size in (1e-30, 1.0, 1e30):
            error = largest_error(with_power(one * np.float32(size), exponent), one.astype(np.float64))
            assert error < 2e-2, (shape, exponent, size)


# -- exact products ------------------------------------------------------------------------------------------------

ON_CPU = on_device(jax.local_devices(backend="cpu")[0])


@settings(max_examples=examples(50))
@given(st.integers(1, 6), st.integers(1, 300), st.integers(1, 6), SEEDS)
def test_a_product_is_the_exact_one_of_its_rounded_factors(rows: int, terms: int, columns: int, seed: int) -> None:
    random, products = np.random.default_rng(seed), Products()
    values = [random.standard_normal(shape, np.float32) for shape in ((rows, terms), (terms, columns))]
    left, right = (products.rounded(each) for each in values)
    assert np.abs(left.integers).max() < 2**14
    assert np.abs(products.value(left) - values[0]).max() <= 2.0**-14 * np.abs(values[0]).max()
    exact = [
        [sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) for column in right.integers.T]
        for row in left.integers
    ]
    found = products.times(left, right)
    unit = math.ldexp(1.0, int(left.exponent + right.exponent) - 28)
    assert found.tolist() == (np.float32(unit) * np.asarray(exact, np.float32)).tolist()
    order = random.permutation(terms)
    again = products.times(
        Factor(left.integers[:, order], left.exponent), Factor(right.integers[order], right.exponent)
    )
    assert again.tobytes() == found.tobytes()


@settings(max_examples=examples(50))
@given(st.integers(1, 6), st.integers(1, 300), st.integers(1, 6), SEEDS)
def test_a_fine_product_is_right_to_24_bits(rows: int, terms: int, columns: int, seed: int) -> None:
    random, products = np.random.default_rng(seed), Products()
    left, right = (random.uniform(-1, 1, shape).astype(np.float32) for shape in ((rows, terms), (terms, columns)))
    found = products.fine(products.halves(left), products.halves(right))
    np.testing.assert_allclose(found, left.astype(np.float64) @ right, rtol=2.0**-22, atol=terms * 2.0**-26)


def by_torch(matrix_RC: Matrix, exponent: float) -> Matrix:
    found: Matrix = required("archipelago.merger.torch_spectra").power(matrix_RC, exponent)
    return found


@pytest.mark.parametrize("power", [ON_CPU, by_torch], ids=["xla", "torch"])
@pytest.mark.parametrize("exponent", [EXPONENTS[0], pytest.param(EXPONENTS[1], marks=pytest.mark.full)])
def test_each_way_comes_to_the_bits_of_numpy(power: Power, exponent: float) -> None:
    """Also in sums that no int32 holds, in matrices of zeros and in those with few values."""
    if power is by_torch:
        required("torch")
        try:
            spectra_trial._by_torch()
        except ArithmeticError as error:
            pytest.skip(str(error))
    random = np.random.default_rng(0)
    x_SC = random.uniform(-1.0, 1.0, (33 if exponent else 8, 70_000)).astype(np.float32)
    sparse_SC = np.where(random.random(x_SC.shape) < 0.001, x_SC, np.float32(0.0))
    odd_SC = random.standard_normal((37, 101), np.float32)  # is padded
    tall_RC, tiny_SC = odd_SC.T * np.float32(2.0**40), odd_SC * np.float32(2.0**-90)
    for values in (x_SC, sparse_SC, -np.zeros_like(x_SC), odd_SC, odd_SC[:, :37], tall_RC, tiny_SC):
        found, expected = power(values, exponent), with_power(values, exponent)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), exponent


def test_sums_that_overflow_keep_pytorch_from_spectra_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = required("torch")

    def saturated(left: Any, right: Any) -> Any:
        """Adds two products of a byte without a sign in int16, as processors of x86 without VNNI do."""
        bytes_AK, other_KB = left.int() + 128, right.int()
        pairs = [bytes_AK[:, k : k + 2] @ other_KB[k : k + 2] for k in range(0, len(other_KB), 2)]
        return sum(pair.clamp(-(1 << 15), (1 << 15) - 1) for pair in pairs) - 128 * other_KB.sum(0)

    monkeypatch.setattr(torch, "_int_mm", saturated)
    assert [name for name, _ in spectra_trial._ways()] == ["XLA"]
    assert not caplog.records


def test_no_thread_that_multiplies_starts_others() -> None:
    torch = required("torch")
    before, found = torch.get_num_threads(), list[int]()
    integers_AK = np.ones((1, 1), np.int16)

    def multiply() -> None:
        required("archipelago.merger.torch_spectra").TorchProducts().product(integers_AK, integers_AK, axis=0)
        found.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == [1]


def test_the_first_way_that_is_better_than_numpy_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(x_SC: Matrix, exponent: float) -> Matrix:
        return np.nextafter(with_power(x_SC, exponent), np.float32(np.inf))

    def slow(x_SC: Matrix, exponent: float) -> Matrix:
        return max((with_power(x_SC, exponent) for _ in range(9)), key=len)

    known = dict[tuple[object, ...], Matrix]()

    def fast(x_SC: Matrix, exponent: float) -> Matrix:
        """Changes each matrix once."""
        key = x_SC.shape, exponent
        return known[key] if key in known else known.setdefault(key, with_power(x_SC, exponent))

    def broken() -> Power:
        raise OSError("libcudart.so.13: cannot open shared object file")

    def used(**ways: Power) -> str:
        monkeypatch.setattr(spectra_trial, "_ways", lambda: ways.items())
        found = spectra_trial._tried.__wrapped__()
        assert found.power is ways.get(found.name)
        assert found.rate > 0
        return found.name

    monkeypatch.setattr(spectra_trial, "_TRIAL", (16, 40))
    assert not has_same_bits(lambda *asked: (with_power if asked[0].shape[0] < 40 else other)(*asked), "it")
    assert "it computes other bits" in caplog.text
    assert used(slow=slow, other=other, fast=fast, faster=fast) == "fast"
    assert used(slow=slow, other=other) == used() == "numpy"
    monkeypatch.undo()
    monkeypatch.setattr(spectra_trial, "_by_torch", broken)
    assert [name for name, _ in spectra_trial._ways()] == ["XLA"]


def test_only_large_matrices_are_changed_by_another_way_than_numpys() -> None:
    used = list[tuple[int, ...]]()

    def faster() -> Power:
        def power(x_SC: Matrix, exponent: float) -> Matrix:
            used.append(x_SC.shape)
            return x_SC

        return power

    def work(matrix_RC: Matrix, exponent: float, power: Power) -> None:
        power(matrix_RC, exponent)

    shapes = ((16, 8), (1024, 512))
    Spectra(faster=faster).change(work, [(np.zeros(shape, np.float32), 0.0) for shape in shapes])
    assert used == [(1024, 512)]


# -- many matrices ---------------------------------------------------------------------------------------------------

ISOTROPIC = MergeConfig(embedding="isotropic", rest="isotropic", embedding_exponent=0.5, rest_exponent=0.0)
STACK = (Group(0, 7 * 20 * 15, "isotropic", (7, 20, 15)), Group(2100, 50 * 30, "isotropic", (50, 30), 0.5))


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra, "_LARGE", 2e4)  # Threads then share rows of these products, too.
    delta_N = np.random.default_rng(0).standard_normal(STACK[-1].end, np.float32)

    def merged(threads: int) -> bytes:
        monkeypatch.setenv("OMP_NUM_THREADS", f"{threads}")
        body = encoded(delta_N, "float32")
        acc = merge_rules.accumulate(merge_rules.begin(STACK), body, STACK, merge_rules.norms(body, STACK)[0])
        return np.asarray(merge_rules.finish(acc, STACK, spectra=Spectra())).tobytes()

    assert merged(1) == merged(2) == merged(5)


def test_a_change_that_fails_leaves_out_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    on, begun = threading.Event(), list[float]()

    def work(matrix_RC: object, exponent: float, power: object) -> None:
        begun.append(exponent)
        if len(begun) == 1:
            raise RuntimeError("no memory")
        assert on.wait(30)

    with pytest.raises(RuntimeError, match="memory"):
        Spectra().change(work, [(np.zeros((2, 2), np.float32), 0.0)] * 100)
    on.set()
    assert len(begun) <= 2


def test_the_environment_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert 1 <= default_threads() <= (os.cpu_count() or 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert default_threads() == 5


TENSORS = (
    Tensor("embedding", (300, 16), "embedding"),
    Tensor("norm", (16,)),
    Tensor("row", (1, 16)),
    Tensor("experts", (4, 16, 40)),
    Tensor("kernel", (2000, 1100)),
    Tensor("none", (0, 4)),
)


def test_a_cycle_costs_what_its_matrices_cost() -> None:
    """The last matrix is cut into blocks of 550 columns."""
    small = operations((300, 16), 0.5) + 4 * operations((16, 40), 0.0)
    assert cycle_work(TENSORS, MergeConfig(embedding="average", rest="rda"))[0] == 0.0
    assert cycle_work(TENSORS, ISOTROPIC)[0] == small + 2 * operations((2000, 550), 0.0)
    whole = MergeConfig(**{**vars(ISOTROPIC), "isotropic_side_max": 1100})
    assert cycle_work(TENSORS, whole)[0] == small + operations((2000, 1100), 0.0)


def test_threads_change_as_many_blocks_of_the_largest_fragment_as_it_has() -> None:
    """Two blocks of 550 × 2000 fit into it: 52 bytes for each element, and 48 for each of a square of the side."""
    block = 52 * 550 * 2000 + 48 * 550 * 550
    for threads, blocks in ((1, 1), (2, 2), (8, 2)):
        assert spectra_bytes(TENSORS, ISOTROPIC, 2_500_000, threads) == blocks * block
    assert spectra_bytes(TENSORS, MergeConfig(embedding="average", rest="rda"), 2_500_000, 8) == 0
    embedding = MergeConfig(embedding="isotropic", rest="rda", embedding_exponent=0.5)
    assert spectra_bytes(TENSORS, embedding, 4800, 1) == 24 * 300 * 16 + 180 * 16 * 16


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("shape", [(256, 256), (1024, 256), (128, 4096)])
def test_the_memory_of_a_change_is_near_the_prediction(shape: tuple[int, int], exponent: float) -> None:
    """Arrays alone take 0.77 to 0.94 of it; resident memory, which the prediction was fitted to, is larger."""
    matrix_RC = np.random.default_rng(0).standard_normal(shape, np.float32)
    tracemalloc.start()
    try:
        with_power(matrix_RC, exponent)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.7 < peak / memory(shape, exponent) < 1.0


# -- other machines ------------------------------------------------------------------------------------------------

_MERGE = """
import jax
import numpy as np
from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.broker.wire import digest_of, encoded
from archipelago.merger import merge_rules
from archipelago.merger.weights import groups as fragment_groups
from archipelago.merger.xla_spectra import on_device
tensors = (
    Tensor("e", (96, 40), "embedding"), Tensor("k", (64, 130)), Tensor("x", (3, 20, 33)), Tensor("v", (700_077,)),
)
offsets = np.cumsum([0, *(tensor.size for tensor in tensors)])
layout = tuple(zip(tensors, map(int, offsets), strict=False))
groups = fragment_groups(layout, MergeConfig(embedding="isotropic", rest="isotropic"))
random, acc = np.random.default_rng(0), merge_rules.begin(groups)
for weight in (1.0, 0.3, 0.7):
    delta_N = random.standard_normal(int(offsets[-1]), np.float32)
    body = encoded(delta_N, "int4")
    norms, norm = merge_rules.norms(body, groups)
    acc = merge_rules.accumulate(acc, body, groups, norms, weight=weight, clip=90.0 / norm)
print(digest_of(np.asarray(merge_rules.finish(acc, groups, total_weight=2.0))))
xla = on_device(jax.local_devices()[0])
for exponent in (0.0, 0.5):
    print(digest_of(xla(random.standard_normal((96, 130), np.float32), exponent)))
"""


@pytest.mark.full
def test_other_processors_come_to_the_same_bits() -> None:
    """The libraries of linear algebra choose their programs by the processor; here they are told which one it is."""
    processors: list[dict[str, str]] = [
        {"OMP_NUM_THREADS": "5", "NPROC": "3"},
        {
            "OPENBLAS_CORETYPE": "Nehalem",
            "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",
            "OPENBLAS_NUM_THREADS": "1",
            "NPROC": "1",
        },
    ]
    running = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", _MERGE], cwd=ROOT, env={**os.environ, **each}, stdout=subprocess.PIPE
        )
        for each in processors
    ]
    digests = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0] * len(running)
    assert len(digests) == 1
