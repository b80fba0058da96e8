"""Train a Llama of transformers beside our islands in JAX, in a run of `tiny`: `python train_llama.py NAME`."""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archipelago import pytorch

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
size = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **size))
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))

with pytorch.join(None, "demo", model, optimizer, island=sys.argv[1], names=pytorch.LLAMA) as run:
    while not run.finished:
        for group in optimizer.param_groups:  # a warm-up, then a decay to a tenth
            group["lr"] = 6e-3 * min((run.step + 1) / 100, 1.0 - 0.9 * run.step / run.steps)
        starts = torch.randint(len(text) - 128, (8, 1))
        batch = text[starts + torch.arange(129)].long()
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.sync(tokens=8 * 128, loss=loss)
print(f"{run.island} ends at step {run.step}")
