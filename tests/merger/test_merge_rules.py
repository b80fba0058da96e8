"""Merge rules: results worked out by hand, and properties that hold for all contributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
from numpy.typing import NDArray

from archipelago.broker.codecs import CODECS
from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.broker.wire import encoded
from archipelago.merger import merge_rules
from archipelago.merger.merge_rules import MERGE_RULES, NORM_MAX
from archipelago.merger.weights import Group, groups

Vector = NDArray[np.float32]
LAYOUT = ((Tensor("bias", (3,)), 0), (Tensor("embed", (4, 2), "embedding"), 3), (Tensor("kernel", (3, 2, 2)), 11))
AVERAGE = (Group(0, 6, "average"),)
RDA = (Group(0, 6, "rda"),)
TWO = (Group(0, 3, "rda"), Group(3, 3, "average"))


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def merged(
    deltas: Sequence[Vector],
    shares: Sequence[float],
    of: tuple[Group, ...],
    *,
    codec: str = "float32",
    clip: float = 1.0,
    gain: float = 1.0,
) -> Vector:
    acc = merge_rules.begin(of)
    for delta_N, share in zip(deltas, shares, strict=True):
        body = encoded(delta_N, codec)
        acc = merge_rules.accumulate(acc, body, of, merge_rules.norms(body, of)[0], weight=share, clip=clip)
    return np.asarray(merge_rules.finish(acc, of, total_weight=sum(shares) or 1.0, gain=gain))


def bits(values: Vector) -> list[int]:
    return [int(b) for b in np.asarray(values).view(np.uint32)]


def norm(values: Vector) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


# -- groups --------------------------------------------------------------------------------------------------------


def test_groups_of_whole_tensors() -> None:
    assert groups(LAYOUT, MergeConfig(embedding="average", rest="rda")) == (
        Group(0, 3, "rda"),
        Group(3, 8, "average"),
        Group(11, 12, "rda"),
    )
    assert set(MERGE_RULES) == set(get_args(get_type_hints(MergeConfig)["rest"]))
    assert set(MERGE_RULES) == set(get_args(get_type_hints(MergeConfig)["embedding"]))


def test_large_matrices_are_merged_in_blocks() -> None:
    layout = ((Tensor("embed", (9, 4), "embedding"), 0), (Tensor("kernel", (2, 5, 3)), 36), (Tensor("bias", (9,)), 66))
    whole = MergeConfig(embedding="isotropic", rest="isotropic", embedding_exponent=0.5, isotropic_side_max=4)
    kernel, bias = Group(36, 30, "isotropic", (2, 5, 3), 0.0), Group(66, 9, "isotropic", (9,), 0.0)
    assert groups(layout, whole) == (Group(0, 36, "isotropic", (9, 4), 0.5), kernel, bias)
    embed = Group(0, 36, "isotropic", (9, 4), 0.5, blocks=2)
    assert groups(layout, replace(whole, isotropic_side_max=3)) == (embed, kernel, bias)
    assert groups(layout, replace(whole, isotropic_side_max=2)) == (embed, replace(kernel, blocks=2), bias)
    average = replace(whole, embedding="average", isotropic_side_max=1)
    assert groups(layout, average)[0] == Group(0, 36, "average"), "only isotropic merging has a limit"


# -- average and isotropic -----------------------------------------------------------------------------------------

MATRIX = (Group(0, 6, "isotropic", (2, 3), 0.0),)


def test_average_by_hand() -> None:
    # ¼·1 + ¾·3 = 2.5 and ¼·2 − ¾·2 = −1
    result = merged([vector(1, 2, 0, 0, 0, 0), vector(3, -2, 0, 0, 0, 0)], [0.25, 0.75], AVERAGE)
    assert result.tolist() == [2.5, -1.0, 0, 0, 0, 0]
    assert bits(merged([np.full(6, -0.0, np.float32)], [1.0], AVERAGE)) == [1 << 31] * 6, "the sign of zero stays"


def test_isotropic_makes_the_singular_values_equal_and_keeps_the_norm() -> None:
    # The mean of the units (1, 0, 0, 0, 0, 0) and (0, 0, 0, 0, 1, 0), of norm 3: both singular values are 3/√2.
    result = merged([vector(4, 0, 0, 0, 0, 0), vector(0, 0, 0, 0, 2, 0)], [0.5, 0.5], MATRIX)
    np.testing.assert_allclose(result, [3 / math.sqrt(2), 0, 0, 0, 3 / math.sqrt(2), 0], rtol=1e-6, atol=1e-6)
    stronger = merged([vector(4, 0, 0, 0, 0, 0), vector(0, 0, 0, 0, 2, 0)], [0.9, 0.1], MATRIX)
    assert abs(stronger[0] - stronger[4]) < 2e-3 * stronger[0]
    assert norm(stronger) == pytest.approx(0.9 * 4 + 0.1 * 2, rel=1e-6)
    result = merged([vector(16, 0, 0, 0, 1, 0)], [1.0], (Group(0, 6, "isotropic", (2, 3), 0.5),))
    assert result[0] / result[4] == pytest.approx(4.0, rel=0.02), "half an exponent leaves the roots"
    assert norm(result) == pytest.approx(math.sqrt(257), rel=1e-6)


def test_each_block_is_merged_as_a_matrix_of_its_own() -> None:
    delta_L = np.random.default_rng(0).standard_normal(40, np.float32)
    blocks = merged([delta_L], [1.0], (Group(0, 40, "isotropic", (4, 10), blocks=2),))
    assert bits(blocks) == bits(merged([delta_L], [1.0], (Group(0, 40, "isotropic", (2, 2, 10)),)))
    tall = merged([delta_L.reshape(4, 10).T.ravel()], [1.0], (Group(0, 40, "isotropic", (10, 4), blocks=2),))
    np.testing.assert_allclose(tall.reshape(10, 4).T.ravel(), blocks, rtol=1e-6)


def test_vectors_rows_and_columns_are_merged_as_by_rda() -> None:
    for shape in ((6,), (1, 6), (6, 1, 1), (2, 3, 1)):
        assert not Group(0, 6, "isotropic", shape, 0.0).changes_spectrum, shape
    column = Group(0, 6, "isotropic", (6, 1), 0.0)
    deltas = [vector(1, 2, 3, 4, 5, 6), vector(-3, 1, 0, 2, 2, 1)]
    assert bits(merged(deltas, [0.25, 0.75], (column,))) == bits(merged(deltas, [0.25, 0.75], RDA))


def test_each_matrix_of_a_stack_keeps_its_own_norm() -> None:
    random = np.random.default_rng(0)
    stack = (random.standard_normal((3, 4, 5)) * [[[1.0]], [[10.0]], [[0.0]]]).astype(np.float32)
    result = merged([stack.ravel()], [1.0], (Group(0, 60, "isotropic", (3, 4, 5), 0.0),)).reshape(3, 4, 5)
    for before, after in zip(stack[:2], result[:2], strict=True):
        assert norm(after.ravel()) == pytest.approx(norm(before.ravel()), rel=1e-5)
        values = np.linalg.svd(after.astype(np.float64), compute_uv=False)
        assert values[0] / values[-1] < 1.003
    assert not result[2].any()


# -- radial-directional average ------------------------------------------------------------------------------------


def test_rda_by_hand() -> None:
    # Norms 7 and 14, unit vectors (1, 0) and (0, 1), shares 3/7 and 4/7. Mean norm: 3 + 8 = 11.
    # Mean of the units: (3/7, 4/7), of norm 5/7, so the direction is (0.6, 0.8).
    result = merged([vector(7, 0, 0, 0, 0, 0), vector(0, 14, 0, 0, 0, 0)], [3 / 7, 4 / 7], RDA)
    np.testing.assert_allclose(result, [6.6, 8.8, 0, 0, 0, 0], rtol=3e-7)
    # Each tensor has its own rule and norm. The first: mean norm (1 + 3)/2 = 2 along (1, 1)/√2. The average: (1, 1).
    result = merged([vector(1, 0, 0, 2, 0, 0), vector(0, 3, 0, 0, 2, 0)], [0.5, 0.5], TWO)
    np.testing.assert_allclose(result, [math.sqrt(2), math.sqrt(2), 0, 1, 1, 0], rtol=3e-7)


def test_rda_of_zeros_of_opposite_directions_and_of_extreme_values() -> None:
    zero, one = np.zeros(6, np.float32), vector(3, 0, 0, 0, 4, 0)
    assert merged([zero, zero], [0.5, 0.5], RDA).tolist() == [0.0] * 6
    np.testing.assert_allclose(merged([zero, one], [0.5, 0.5], RDA), one / 2, rtol=3e-7)  # norm (0 + 5)/2
    assert merged([one, zero], [0.0, 1.0], RDA).tolist() == [0.0] * 6
    turns = [2 * math.pi * third / 3 for third in range(3)]
    deltas = [vector(math.cos(turn), math.sin(turn), 0, 0, 0, 0) for turn in turns]
    assert merged(deltas, [1 / 3] * 3, RDA).tolist() == [0.0] * 6, "directions cancel"
    assert norm(merged(deltas, [0.34, 0.33, 0.33], RDA)) == pytest.approx(1.0)  # the remainder is a direction
    assert merged([vector(5, 1, 0, 0, 0, 0), vector(-5, -1, 0, 0, 0, 0)], [0.5, 0.5], RDA).tolist() == [0.0] * 6
    for size in (9e8, 1e-27):
        deltas = [vector(size, 0, 0, 0, 0, 0), vector(0, size, 0, 0, 0, 0)]
        root = size / math.sqrt(2)
        np.testing.assert_allclose(merged(deltas, [0.5, 0.5], RDA), [root, root, 0, 0, 0, 0], rtol=3e-7)


def test_the_norm_of_many_elements_is_accurate() -> None:
    delta_N = np.full(1 << 20, 0.7, np.float32)
    delta_N[0] = 1.0  # chosen so that the scaled squares are not round numbers; adding them one by one is far off
    result = merged([delta_N], [1.0], (Group(0, 1 << 20, "rda"),))
    np.testing.assert_allclose(result, delta_N, rtol=1e-6)


# -- all rules -----------------------------------------------------------------------------------------------------


def test_squares_are_summed_in_an_order_that_no_machine_chooses() -> None:
    """XLA divides other sums of as many elements among threads."""
    lengths = (700_077, 5, 1024)
    ends = np.cumsum(lengths)
    values_N = np.random.default_rng(0).standard_normal(int(ends[-1]), np.float32)
    split = tuple(
        Group(int(end) - length, int(end), "rda", (length,)) for end, length in zip(ends, lengths, strict=True)
    )
    found, _ = merge_rules.norms(encoded(values_N, "float32"), split)
    unit = np.float32(2.0**30)
    for group, norm in zip(split, found, strict=True):
        squares_L = np.square(values_N[group.start : group.end] * unit)
        row_W = np.zeros(1024, np.float32)
        for start in range(0, len(squares_L), 1024):
            row_W[: len(squares_L) - start] += squares_L[start : start + 1024]
        while len(row_W) > 1:
            row_W = row_W[: len(row_W) // 2] + row_W[len(row_W) // 2 :]
        assert norm == np.sqrt(row_W[0]) / unit


def test_a_contribution_is_clipped_and_a_round_has_a_gain() -> None:
    five = vector(3, 0, 0, 0, 4, 0)
    for of in (AVERAGE, RDA, TWO):
        assert merge_rules.norms(encoded(five, "float32"), of)[1] == pytest.approx(5.0)
        np.testing.assert_allclose(merged([five], [1.0], of, clip=0.1, gain=2.0), [0.6, 0, 0, 0, 0.8, 0], rtol=1e-6)


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "top3"])
def test_contributions_are_decoded_by_their_codec(codec: str) -> None:
    sent = vector(3, -1, 0, 0.5, 7, 2)
    body = encoded(sent, codec)
    values, (of_tensors, whole) = CODECS[codec].restore(body.parts, 6, np), merge_rules.norms(body, TWO)
    assert [*of_tensors, whole] == pytest.approx([norm(values[:3]), norm(values[3:]), norm(values)], rel=1e-6)
    np.testing.assert_allclose(merged([sent], [1.0], TWO, codec=codec), values, rtol=1e-6)


def test_a_nan_or_a_huge_value_shows_in_the_norm() -> None:
    for of in (AVERAGE, RDA, TWO):
        for bad in (math.nan, math.inf, -math.inf, 1.1 * NORM_MAX, 1e38):
            assert not merge_rules.norms(encoded(vector(0, 0, bad, 0, 0, 0), "float32"), of)[1] <= NORM_MAX
