"""Train a small network on several machines: run `python train_jax.py NAME` on each, with another name."""

import sys

import jax
import numpy as np
import optax
from flax import nnx

from archipelago import SyncConfig, create, join

rngs = nnx.Rngs(0)
network, params = nnx.split(nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 4, rngs=rngs)))
optimizer = optax.adam(1e-3)
opt_state = optimizer.init(params)
own_data = np.random.default_rng()  # each island draws other examples
teacher = np.random.default_rng(0).normal(size=(16, 4))


def loss_of(params, inputs, labels):
    return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(network, params)(inputs), labels).mean()


@jax.jit
def train_step(params, opt_state, inputs, labels):
    loss, gradients = jax.value_and_grad(loss_of)(params, inputs, labels)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


create(None, "mine", params, sync=SyncConfig(interval=24, fragments=2), steps=20_000)
with join(None, "mine", params, state=lambda: opt_state, island=sys.argv[1]) as run:
    params, opt_state = run.params, run.state
    while not run.finished:
        inputs = own_data.normal(size=(64, 16)).astype(np.float32)
        labels = (inputs @ teacher).argmax(axis=1)
        params, opt_state, loss = train_step(params, opt_state, inputs, labels)
        params = run.sync(params, tokens=len(inputs), loss=loss)
print(f"{run.island} ends at step {run.step}")
