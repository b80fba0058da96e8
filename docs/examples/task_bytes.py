"""A task: predict the next byte of Python's own source code. `archipelago up --task task_bytes.py` trains it."""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax

from archipelago import Task

folder = Path(argparse.__file__).parent
text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("[a-h]*.py"))), np.uint8)
windows = np.lib.stride_tricks.sliding_window_view(text, 9)[::8]  # eight bytes and the next one
held_out, train = windows[::50], np.delete(windows, np.s_[::50], axis=0)


def init(seed):
    keys, normal = jax.random.split(jax.random.key(seed), 3), jax.nn.initializers.normal(0.1)
    shapes = {"embedding": (256, 16), "hidden": (8 * 16, 128), "output": (128, 256)}
    return {name: normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(params, batch):
    known = params["embedding"][batch[:, :8].astype(int)].reshape(len(batch), -1)
    logits = jax.nn.relu(known @ params["hidden"]) @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 8].astype(int)).mean()


def batches(run):
    for shard in run.shards(16):  # as a rule, no other island reads this part of the text meanwhile
        mine = np.random.default_rng(shard.seed).permutation(np.arange(shard.number, len(train), shard.of))
        for number in range(shard.position, len(mine) // 64):
            yield train[mine[number * 64 : (number + 1) * 64]]


optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, 1500))  # by the run's clock
task = Task(init, loss, batches, evaluate=jax.jit(lambda params: loss(params, held_out)), optimizer=optimizer)
