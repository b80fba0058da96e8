"""A task: classify handwritten digits with a transformer over patches of scikit-learn's images."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from archipelago import Task

pixels, labels = load_digits(return_X_y=True)  # 1,797 images of 8 × 8 pixels from 0 to 16
cut = (pixels / 8 - 1).astype(np.float32).reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4)
data = {"patches": cut.reshape(-1, 16, 4), "label": labels.astype(np.int32)}  # sixteen patches of four pixels
order = np.random.default_rng(0).permutation(len(labels))  # the file is sorted by writer
held_out, train = ({name: x[part] for name, x in data.items()} for part in (order[:297], order[297:]))
WIDTH, LAYERS = 48, 2


def init(seed):
    def drawn(rows, columns):
        return rng.normal(0, 0.5 / rows**0.5, (rows, columns)).astype(np.float32)

    rng = np.random.default_rng(seed)
    shapes = {"queries": (1, 1), "keys": (1, 1), "values": (1, 1), "out": (1, 1), "up": (1, 3), "down": (3, 1)}
    layers = [{name: drawn(a * WIDTH, b * WIDTH) for name, (a, b) in shapes.items()} for _ in range(LAYERS)]
    places = rng.normal(0, 0.5, (16, WIDTH)).astype(np.float32)
    return {"patch_embedding": drawn(4, WIDTH), "place_embedding": places, "layers": layers, "output": drawn(WIDTH, 10)}


def logits_of(params, patches):
    x = patches @ params["patch_embedding"] + params["place_embedding"]
    for layer in params["layers"]:
        y = jax.nn.standardize(x)
        heads = ((y @ layer[name]).reshape(*y.shape[:2], 2, -1) for name in ("queries", "keys", "values"))
        x = x + jax.nn.dot_product_attention(*heads).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]
    return jax.nn.standardize(x).mean(axis=1) @ params["output"]


def loss(params, batch):
    logits = logits_of(params, batch["patches"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def evaluate(params):
    guesses = logits_of(params, held_out["patches"]).argmax(axis=1)
    return {"loss": loss(params, held_out), "accuracy": jnp.mean(guesses == held_out["label"])}


def batches(run):
    for shard in run.shards(8):
        mine = np.random.default_rng(shard.seed).permutation(np.arange(shard.number, 1500, shard.of))
        for number in range(shard.position, len(mine) // 32):
            chosen = mine[number * 32 : (number + 1) * 32]
            yield {name: x[chosen] for name, x in train.items()}


task = Task(init, loss, batches, evaluate)  # with the AdamW of the run's settings (--inner.learning-rate)
