"""Train a small model with Lightning on several machines: run `python train_lightning.py NAME` on each."""

import argparse
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from archipelago import SyncConfig
from archipelago.lightning import ArchipelagoCallback

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))


class Bytes(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(8 * 16, 128), nn.ReLU())
        self.head = nn.Linear(128, 256)

    def training_step(self, windows, number):
        return nn.functional.cross_entropy(self.head(self.network(windows[:, :8])), windows[:, 8])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


callback = ArchipelagoCallback(None, "mine", steps=6_000, sync=SyncConfig(interval=24, fragments=2), island=sys.argv[1])
trainer = Trainer(callbacks=[callback], accelerator="cpu", logger=False)
trainer.fit(Bytes(), torch.utils.data.DataLoader(text.unfold(0, 9, 1), batch_size=64, shuffle=True))
trainer.save_checkpoint(f"{sys.argv[1]}.ckpt")  # the run's model
print(f"{sys.argv[1]} ends at step {callback.island.step}")
