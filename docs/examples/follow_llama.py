"""Generate text by a Llama of transformers while a run of `tiny` trains, as `archipelago up --run demo` does."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import archipelago
from archipelago import pytorch

size = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **size))  # its values do not matter
prompt = sys.argv[1] if len(sys.argv) > 1 else "def "
tokens = torch.tensor([list(prompt.encode())])

# Each version changes the model in place, between two calls of `generate`.
for version in archipelago.follow(None, "demo", like=model, names=pytorch.LLAMA):
    found = model.generate(tokens, max_new_tokens=60, do_sample=True, temperature=0.8, pad_token_id=0)
    print(f"step {version.step:,}: {bytes(found[0].tolist()).decode(errors='replace')!r}", flush=True)
