"""Train a small network with Tunix on several machines: run `python train_tunix.py NAME` on each, with another name."""

import sys

import numpy as np
import optax
from flax import nnx
from tunix.sft.hooks import TrainingHooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from archipelago import SyncConfig, create, join

teacher, rngs = np.random.default_rng(0).normal(size=(16, 4)), nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 4, rngs=rngs))
trainer = PeftTrainer(model, optax.adam(1e-3), TrainingConfig(eval_every_n_steps=1000))
trainer.with_loss_fn(lambda model, x, y: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean())


def batches():
    while not run.finished:
        x = np.random.normal(size=(64, 16)).astype(np.float32)  # each island draws other examples
        yield {"x": x, "y": (x @ teacher).argmax(axis=1)}


class Island(TrainingHooks):
    def on_train_step_end(self, trainer, step, loss):
        nnx.update(trainer.model, run.sync(nnx.state(trainer.model, nnx.Param), tokens=64, loss=loss))

    on_train_start = on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = lambda *about: None


create(None, "mine", params := nnx.state(model, nnx.Param), sync=SyncConfig(interval=24, fragments=2), steps=6_000)
with join(None, "mine", params, state=lambda: nnx.state(trainer.optimizer), island=sys.argv[1]) as run:
    nnx.update(model, run.params)
    nnx.update(trainer.optimizer, run.state)
    trainer.with_training_hooks(Island())
    trainer.train(batches())
nnx.update(model, run.final())
print(f"{run.island} ends at step {run.step}")
