"""The image classifier: patches, loss, accuracy and gradients."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.islands.evaluation import compile_evaluation
from archipelago.islands.models import vision
from archipelago.islands.models.interface import Model
from archipelago.islands.models.vision import Images
from tests.islands.models import mini


@pytest.fixture(scope="module")
def digits() -> Model:
    return mini.images()


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


def test_the_loss_bits_and_accuracy_depend_on_the_labels_alone(digits: Model) -> None:
    params, seen = mini.params_of(digits), examples(70)
    first = seen[:64]  # evaluation reads whole batches of 32
    logits = np.asarray(mini.compiled(digits).logits(params, first[:, :-1]), np.float64)
    labels = np.asarray(first[:, -1])
    assert logits.shape == (64, 10)
    assert digits.example_bytes == 65
    by_hand = [math.log(np.exp(row).sum()) - row[int(label)] for row, label in zip(logits, labels, strict=True)]
    assert float(mini.compiled(digits).loss(params, first)) == pytest.approx(np.mean(by_hand), rel=1e-5)
    found = mini.measures(digits, np.asarray(seen), params)
    assert found.accuracy == pytest.approx(np.mean(logits.argmax(-1) == labels))
    assert found.bits == pytest.approx(np.mean(by_hand) / math.log(2), rel=1e-5)
    assert compile_evaluation(digits, np.asarray(seen))(params) == pytest.approx(found.bits, rel=1e-6)


def test_accuracy_of_text_counts_every_next_token() -> None:
    text = mini.dense()
    params, seen = mini.params_of(text), np.array(mini.tokens(4, 65))
    logits = mini.compiled(text).logits
    guesses = np.asarray(logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1)
    seen[:, 1:9] = guesses[:, :8]
    right = np.asarray(logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1) == seen[:, 1:]
    assert mini.measures(text, seen, params).accuracy == pytest.approx(right.mean())


@pytest.mark.full
def test_every_patch_affects_the_loss_and_gradient_descent_fits_a_batch(digits: Model) -> None:
    params, seen = digits.init(0), examples(32)
    assert abs(float(mini.compiled(digits).loss(params, seen)) - math.log(10)) < 0.5
    logits = mini.compiled(digits).logits
    before = logits(params, seen[:, :-1])
    for pixel in range(0, 64, 9):
        changed = seen.at[:, pixel].set(16 - seen[:, pixel])
        moved = np.abs(np.asarray(logits(params, changed[:, :-1]) - before)).max(axis=1)
        assert (moved[np.asarray(seen[:, pixel]) != 8] > 0).all()
    step = mini.jitted(jax.value_and_grad(digits.loss))
    losses = []
    for _ in range(30):
        loss, slopes = step(params, seen)
        losses.append(float(loss))
        assert all(float(jnp.abs(slope).max()) > 0 for slope in slopes.values())
        params = jax.tree.map(lambda value, slope: value - 0.3 * slope, params, slopes)
    assert losses[-1] < 0.9 * losses[0]
    kinds = {tensor.name: tensor.kind for tensor in digits.tensors}
    assert kinds["patches.embedding"] == kinds["positions.embedding"] == "embedding"
    assert kinds["output.kernel"] == "rest"
