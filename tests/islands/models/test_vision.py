"""The image classifier: patches, loss, accuracy and gradients."""

from __future__ import annotations

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.islands.evaluation import compile_evaluation
from archipelago.islands.models import vision
from archipelago.islands.models.interface import Model
from archipelago.islands.models.registry import build
from archipelago.islands.models.vision import Images
from tests.measures import measures


@pytest.fixture(scope="module")
def digits() -> Model:
    made = build("digits", jnp.float32)
    return made._replace(loss=jax.jit(made.loss), logits=jax.jit(made.logits))


def examples(count: int, seed: int = 0) -> jax.Array:
    random = np.random.default_rng(seed)
    pixels, labels = random.integers(0, 17, (count, 64), np.uint8), random.integers(0, 10, (count, 1), np.uint8)
    return jnp.asarray(np.concatenate([pixels, labels], axis=1))


def test_patches_are_cut_row_by_row_and_scaled() -> None:
    pixels = jnp.arange(16, dtype=jnp.uint8)[None]
    found = vision.patches(pixels, Images(side=4, patch=2, brightest=16, classes=3))
    expected = np.array([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]) / 8 - 1
    assert found.shape == (1, 4, 4)
    np.testing.assert_allclose(found[0], expected)


@pytest.mark.full
def test_the_loss_depends_on_the_labels_alone(digits: Model) -> None:
    params, seen = digits.init(0), examples(6)
    logits = np.asarray(digits.logits(params, seen[:, :-1]), np.float64)
    assert logits.shape == (6, 10)
    by_hand = [math.log(np.exp(row).sum()) - row[int(label)] for row, label in zip(logits, seen[:, -1], strict=True)]
    assert float(digits.loss(params, seen)) == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert digits.example_bytes == 65
    assert abs(float(digits.loss(params, examples(256))) - math.log(10)) < 0.3


def test_bits_and_accuracy_come_from_the_same_examples(digits: Model) -> None:
    params, seen = digits.init(0), examples(70)
    first = seen[:64]  # evaluation reads whole batches of 32
    guesses = np.asarray(digits.logits(params, first[:, :-1])).argmax(-1)
    found = measures(digits, np.asarray(seen), params)
    assert found.accuracy == pytest.approx(np.mean(guesses == np.asarray(first[:, -1])))
    assert found.bits == pytest.approx(float(digits.loss(params, first)) / math.log(2), rel=1e-5)
    assert compile_evaluation(digits, np.asarray(seen))(params) == pytest.approx(found.bits, rel=1e-6)


def test_accuracy_of_text_counts_every_next_token() -> None:
    tiny = build("tiny", jnp.float32)
    params, seen = tiny.init(0), np.random.default_rng(0).integers(0, 256, (4, 17), np.uint8)
    logits = jax.jit(tiny.logits)
    guesses = np.asarray(logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1)
    seen[:, 1:9] = guesses[:, :8]
    right = np.asarray(logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1) == seen[:, 1:]
    assert measures(tiny, seen, params).accuracy == pytest.approx(right.mean())


@pytest.mark.full
def test_every_patch_affects_the_loss_and_every_tensor_has_a_gradient(digits: Model) -> None:
    params, seen = digits.init(0), examples(4)
    before = digits.logits(params, seen[:, :-1])
    for pixel in range(0, 64, 9):
        changed = seen.at[:, pixel].set(16 - seen[:, pixel])
        moved = np.abs(np.asarray(digits.logits(params, changed[:, :-1]) - before)).max(axis=1)
        assert (moved[np.asarray(seen[:, pixel]) != 8] > 0).all()
    slopes = jax.jit(jax.grad(digits.loss))(params, seen)
    assert all(float(jnp.abs(slope).max()) > 0 for slope in slopes.values())
    kinds = {tensor.name: tensor.kind for tensor in digits.tensors}
    assert kinds["patches.embedding"] == kinds["positions.embedding"] == "embedding"
    assert kinds["output.kernel"] == "rest"


@pytest.mark.full
def test_gradient_descent_fits_a_batch(digits: Model) -> None:
    params, seen = digits.init(0), examples(32)
    step = jax.jit(jax.value_and_grad(digits.loss))
    losses = []
    for _ in range(30):
        loss, slopes = step(params, seen)
        losses.append(float(loss))
        params = jax.tree.map(lambda value, slope: value - 0.3 * slope, params, slopes)
    assert losses[-1] < 0.9 * losses[0]
    assert sum(after < before for before, after in pairwise(losses)) > 20
