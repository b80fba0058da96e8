"""Fine-tune a network with LoRA on several machines: run `python lora_jax.py NAME` on each, with another name."""

import itertools
import sys

import jax
import numpy as np
import optax

from archipelago import SyncConfig, create, join

SIZES, RANK = [16, 64, 64, 4], 4
seeded, own_data = np.random.default_rng(0), np.random.default_rng()  # each island draws other examples
layers = list(itertools.pairwise(SIZES))
params = {
    "base": [seeded.normal(size=(n, m), scale=n**-0.5).astype(np.float32) for n, m in layers],  # yours is pre-trained
    "lora": [
        {"a": seeded.normal(size=(n, RANK), scale=n**-0.5).astype(np.float32), "b": np.zeros((RANK, m), np.float32)}
        for n, m in layers
    ],
}
teacher = seeded.normal(size=(16, 4))
optimizer = optax.adamw(1e-3)
opt_state = optimizer.init(params["lora"])


def loss_of(lora, base, inputs, labels):
    for kernel, adapter in zip(base, lora, strict=True):
        outputs = inputs @ kernel + inputs @ adapter["a"] @ adapter["b"]
        inputs = jax.nn.relu(outputs)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


@jax.jit
def train_step(params, opt_state, inputs, labels):
    loss, gradients = jax.value_and_grad(loss_of)(params["lora"], params["base"], inputs, labels)
    updates, opt_state = optimizer.update(gradients, opt_state, params["lora"])
    return params | {"lora": optax.apply_updates(params["lora"], updates)}, opt_state, loss


create(None, "mine", params, trained="^lora", sync=SyncConfig(interval=24, fragments=2), steps=6_000)
with join(None, "mine", params, state=lambda: opt_state, island=sys.argv[1]) as run:
    params, opt_state = run.params, run.state
    while not run.finished:
        inputs = own_data.normal(size=(64, 16)).astype(np.float32)
        labels = (inputs @ teacher).argmax(axis=1)
        params, opt_state, loss = train_step(params, opt_state, inputs, labels)
        params = run.sync(params, tokens=len(inputs), loss=loss)
print(f"{run.island} ends at step {run.step}")
