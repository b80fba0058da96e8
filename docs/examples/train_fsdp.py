"""Train a model that two processes share, as one island: `torchrun --nproc-per-node 2 train_fsdp.py NAME`."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from archipelago import SyncConfig, pytorch

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(8 * 16, 128), nn.ReLU(), nn.Linear(128, 256))
model = fully_shard(model.to(device), mesh=mesh)  # a large model: each of its layers first
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

pytorch.create(None, "mine", model, sync=SyncConfig(interval=24, fragments=3), steps=1_200, kinds=r"^0\.")
torch.seed()  # each process draws other examples
with pytorch.join(None, "mine", model, optimizer, island=sys.argv[1]) as run:
    while not run.finished:
        starts = torch.randint(len(text) - 8, (64, 1))
        windows = text[starts + torch.arange(9)].to(device)
        loss = nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.sync(tokens=len(windows) * mesh.size(), loss=loss)
if dist.get_rank() == 0:
    print(f"{sys.argv[1]} ends at step {run.step}")
dist.destroy_process_group()
