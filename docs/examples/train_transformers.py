"""Train a small GPT-2 on several machines: run `python train_transformers.py NAME` on each, with another name."""

import argparse
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from archipelago import SyncConfig
from archipelago.transformers import ArchipelagoCallback

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
windows = [{"input_ids": each, "labels": each} for each in text.unfold(0, 64, 32)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
args = TrainingArguments(f"gpt2-{sys.argv[1]}", per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=10)
args.report_to, args.save_strategy = [], "no"
args.seed = torch.seed() % 2**32  # each island draws other examples

callback = ArchipelagoCallback(None, "mine", steps=6_000, sync=SyncConfig(interval=24, fragments=2), island=sys.argv[1])
trainer = Trainer(model, args, train_dataset=windows, callbacks=[callback])
trainer.train()
trainer.save_model()  # the run's model
print(f"{sys.argv[1]} ends at step {callback.island.step}")
