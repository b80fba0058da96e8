"""Train a small model of bytes on several machines: run `python train_torch.py NAME` on each, with another name."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from archipelago import SyncConfig, pytorch

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(8 * 16, 128), nn.ReLU(), nn.Linear(128, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

pytorch.create(None, "mine", model, sync=SyncConfig(interval=24, fragments=2), steps=6_000, kinds=r"^0\.")
torch.seed()  # each island draws other examples
with pytorch.join(None, "mine", model, optimizer, island=sys.argv[1]) as run:
    while not run.finished:
        starts = torch.randint(len(text) - 8, (64, 1))
        windows = text[starts + torch.arange(9)]
        loss = nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.sync(tokens=len(windows), loss=loss)
print(f"{run.island} ends at step {run.step}")
