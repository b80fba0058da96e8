"""Train an equinox network on handwritten digits: run `python train_equinox.py NAME`, each with another NAME."""

import sys

import equinox
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from archipelago import SyncConfig, create, join

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
train = np.arange(1500)  # the other 297 images are for the test
model = equinox.nn.MLP(in_size=64, out_size=10, width_size=128, depth=2, key=jax.random.key(0))
params, functions = equinox.partition(model, equinox.is_inexact_array)
optimizer = optax.adamw(1e-3)
opt_state = optimizer.init(params)
own_data = np.random.default_rng()  # each island draws other batches


def logits_of(params, images):
    return jax.vmap(equinox.combine(params, functions))(images)


def loss_of(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


@jax.jit
def train_step(params, opt_state, images, labels):
    loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


create(None, "mine", params, sync=SyncConfig(interval=24, fragments=2), steps=4_000)
with join(None, "mine", params, state=lambda: opt_state, island=sys.argv[1]) as run:
    params, opt_state = run.params, run.state
    while not run.finished:
        batch = own_data.choice(train, 64)
        params, opt_state, loss = train_step(params, opt_state, images[batch], labels[batch])
        params = run.sync(params, tokens=len(batch), loss=loss)
params = run.final()  # the run's own, not this island's
right = (logits_of(params, images[1500:]).argmax(axis=1) == labels[1500:]).mean()
print(f"{run.island} ends at step {run.step} with {right:.0%} of the test images right")
