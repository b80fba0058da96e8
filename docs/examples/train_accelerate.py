"""Train a small model with accelerate on several machines: run `python train_accelerate.py NAME` on each."""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from archipelago.accelerate import LocalSGD  # instead of `from accelerate.local_sgd import LocalSGD`

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(8 * 16, 128), nn.ReLU(), nn.Linear(128, 256))
loader = torch.utils.data.DataLoader(text.unfold(0, 9, 1), batch_size=64, shuffle=True)
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)

with LocalSGD(accelerator, model, local_sgd_steps=24, name="mine", steps=6_000, island=sys.argv[1]) as local:
    while not local.finished:
        for windows in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step(loss=loss)
            if local.finished:
                break
accelerator.save_model(model, f"model-{sys.argv[1]}")  # the run's model
print(f"{sys.argv[1]} ends at step {local.island.step}")
