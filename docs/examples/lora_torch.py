"""Fine-tune a Llama with LoRA on several machines: run `python lora_torch.py NAME` on each, with another name."""

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from archipelago import SyncConfig, pytorch

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
torch.manual_seed(0)  # all islands need the same base; yours is LlamaForCausalLM.from_pretrained(…)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
config.initializer_range = 0.2
model = get_peft_model(
    LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"])
)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

# What requires gradients is trained and sent: the adapters.
pytorch.create(None, "mine", model, sync=SyncConfig(interval=24, fragments=2), steps=600)
torch.seed()  # each island draws other examples
with pytorch.join(None, "mine", model, optimizer, island=sys.argv[1]) as run:
    while not run.finished:
        starts = torch.randint(len(text) - 64, (16, 1))
        batch = text[starts + torch.arange(64)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.sync(tokens=batch.numel(), loss=loss)
print(f"{run.island} ends at step {run.step}")
run.final()  # the model has the run's adapters from here on
model.save_pretrained(f"adapter-{run.island}", save_embedding_layers=False)
