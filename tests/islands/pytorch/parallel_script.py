"""One process of an island in DistributedDataParallel. Its arguments are a rank, a file to meet by, and a URL.

It writes the run's clock, and digests of its parameters and first moments.
"""

import hashlib
import sys

import torch
import torch.distributed as dist

import archipelago

rank, meeting, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
torch.manual_seed(rank)  # the processes begin with different parameters, and read different data
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16), torch.nn.Linear(8, 1, dtype=torch.bfloat16))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if rank == 0:
    archipelago.pytorch.create(url, "own", model, steps=120, sync=archipelago.SyncConfig(interval=8, fragments=2))
dist.barrier()
torch.manual_seed(rank)
with archipelago.pytorch.join(url, "own", model, optimizer, island="both") as run:
    while not run.finished:
        inputs = torch.randn(4, 8, dtype=torch.bfloat16)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.sync(tokens=8, loss=loss)
    step = run.step
values = torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])
moments = torch.cat([state["exp_avg"].float().reshape(-1) for state in optimizer.state.values()])
digests = [hashlib.sha256(each.numpy().tobytes()).hexdigest()[:16] for each in (values, moments)]
sys.stdout.write(" ".join([str(step), *digests]))
dist.destroy_process_group()
