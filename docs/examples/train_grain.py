"""Train a flax linen network with a grain loader: run `python train_grain.py NAME`, each with another NAME."""

import sys
import zlib

import grain
import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from archipelago import SyncConfig, create, join

island = sys.argv[1]
pixels, digits = load_digits(return_X_y=True)
examples = [{"image": image, "label": label} for image, label in zip(pixels[:1500], digits[:1500], strict=True)]


def scaled(example):
    return {"image": (example["image"] / 16).astype(np.float32), "label": example["label"]}


order = zlib.crc32(island.encode())  # each island reads the examples in another order
loader = grain.MapDataset.source(examples).shuffle(seed=order).map(scaled).repeat().batch(64)
network = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)])
params = network.init(jax.random.key(0), np.zeros((1, 64), np.float32))
optimizer = optax.adamw(1e-3)
opt_state = optimizer.init(params)


def loss_of(params, batch):
    logits = network.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


create(None, "mine", params, sync=SyncConfig(interval=24, fragments=2), steps=2_000)
with join(None, "mine", params, state=lambda: opt_state, island=island) as run:
    params, opt_state = run.params, run.state
    for batch in loader.to_iter_dataset():
        params, opt_state, loss = train_step(params, opt_state, batch)
        params = run.sync(params, tokens=len(batch["label"]), loss=loss)
        if run.finished:
            break
print(f"{run.island} ends at step {run.step}")
