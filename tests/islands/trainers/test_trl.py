"""TRL's trainers for SFT, DPO and GRPO, which take the callback of `Trainer`. Model and tokenizer are made here."""

from __future__ import annotations

from typing import Any

import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.broker.redis.transport import connect
from tests import pytorch
from tests.islands.user_loop.any_framework import merged_by, served

torch = pytorch.required()
transformers = pytorch.required("transformers")
trl = pytorch.required("trl")
datasets = pytorch.required("datasets")

from archipelago.transformers import ArchipelagoCallback  # noqa: E402 - it imports transformers

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

WORDS = ["<pad>", "<s>", "</s>", *"abcdefgh"]
TEXTS = [" ".join("abcdefgh"[n % 5 : n % 5 + 3]) for n in range(32)]
STEPS = 20


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sft(**given: Any) -> Any:
    args = trl.SFTConfig(max_length=16, **given.pop("options"))
    return trl.SFTTrainer(llama(), args, train_dataset=datasets.Dataset.from_dict({"text": TEXTS}), **given)


def dpo(**given: Any) -> Any:
    args = trl.DPOConfig(max_length=16, **given.pop("options"))
    data = {"prompt": TEXTS, "chosen": [" d"] * 32, "rejected": [" e"] * 32}
    return trl.DPOTrainer(llama(), llama(), args=args, train_dataset=datasets.Dataset.from_dict(data), **given)


def grpo(**given: Any) -> Any:
    args = trl.GRPOConfig(num_generations=2, max_completion_length=4, **given.pop("options"))

    def rewards(completions: list[str], **about: Any) -> list[float]:
        return [float(text.count("a")) for text in completions]

    data = datasets.Dataset.from_dict({"prompt": TEXTS})
    return trl.GRPOTrainer(llama(), reward_funcs=rewards, args=args, train_dataset=data, **given)


@pytest.mark.parametrize("kind", [sft, dpo, grpo])
def test_a_trainer_of_trl_is_an_island(kind: Any, url: str) -> None:
    sync = SyncConfig(interval=4, fragments=1)
    archipelago.pytorch.create(url, "own", llama(), steps=STEPS, sync=sync)
    callback = ArchipelagoCallback(url, "own", steps=STEPS, sync=sync)
    options = {"output_dir": "out", "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False,
               "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 5}  # fmt: skip
    made = kind(processing_class=tokenizer(), callbacks=[callback], options=options)
    with served(url) as merger:
        made.train()
        values = merged_by(merger)
    assert callback.island.step == STEPS <= made.state.global_step
    assert connect(url, "own").reader.counters().merged > 0
    for name, tensor in made.model.named_parameters():
        torch.testing.assert_close(tensor.detach(), torch.from_numpy(values[name]), rtol=0, atol=0)
