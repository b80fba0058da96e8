"""Our dense transformer in the names and layouts of Llama's, as Hugging Face's files have them.

It is that very architecture (arXiv 2302.13971): RMSNorm before attention and MLP, rotary positions over halves, SwiGLU,
no biases; with as many keys as queries, and the embedding again as the output. Only names differ, and that projections
are [out, in] there and [in, out] here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from archipelago.broker.errors import ConfigError
from archipelago.islands.models.layers import NORM_EPSILON, ROTARY_BASE, Size

_ONCE = {"embedding": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}
_IN_LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.query.kernel": "self_attn.q_proj.weight",
    "attention.key.kernel": "self_attn.k_proj.weight",
    "attention.value.kernel": "self_attn.v_proj.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.kernel": "mlp.gate_proj.weight",
    "mlp.up.kernel": "mlp.up_proj.weight",
    "mlp.down.kernel": "mlp.down_proj.weight",
}
_OURS = {theirs: ours for ours, theirs in _IN_LAYER.items()} | {theirs: ours for ours, theirs in _ONCE.items()}
_LAYER = re.compile(r"(layers\.[0-9]{1,4})\.(.+)")
OUTPUT = "lm_head.weight"
"""the output projection, which here is the embedding again"""


class Place(NamedTuple):
    """Where a tensor of one naming is found in the other."""

    name: str
    transposed: bool


def to_llama(name: str) -> Place:
    """Llama's name of our tensor. Raises KeyError for one that the dense transformer does not have."""
    found = _LAYER.fullmatch(name)
    theirs = f"model.{found[1]}.{_IN_LAYER[found[2]]}" if found else _ONCE[name]
    return Place(theirs, name.endswith(".kernel"))


def from_llama(name: str) -> Place:
    """Our name of a tensor by Llama's; any other name is taken for ours."""
    found = _LAYER.fullmatch(name.removeprefix("model."))
    if found and found[2] in _OURS:
        ours = f"{found[1]}.{_OURS[found[2]]}"
        return Place(ours, ours.endswith(".kernel"))
    return Place(_OURS.get(name, name), False)


def config_of(size: Size, vocabulary: int, positions: int, dtype: str) -> dict[str, Any]:
    """What `config.json` says of a model of this size. `dtype` is that of its file."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.width // size.heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }


def size_of(config: Mapping[str, Any]) -> Size:
    """The size that such a `config.json` names. Raises ConfigError, with why, for what our transformer is not."""
    require_ours(config)
    try:
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        size = Size(width, int(config["num_hidden_layers"]), heads, int(config["intermediate_size"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"config.json describes no Llama ({error!r:.100})", "Was it written by hand?") from None
    if min(size.width, size.layers, size.heads, size.hidden) < 1 or size.width % (2 * size.heads):
        raise ConfigError(f"config.json describes no Llama: its sizes cannot be ({size})", "Was it written by hand?")
    return size


def require_ours(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a Llama that computes something else than our transformer with the same tensors."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default")) if isinstance(rotary, Mapping) else "unknown"
    theta = rotary.get("rope_theta") if isinstance(rotary, Mapping) else None
    heads = config.get("num_attention_heads")
    found = {
        "rms_norm_eps": (config.get("rms_norm_eps", NORM_EPSILON), NORM_EPSILON),
        "rope_theta": (theta or config.get("rope_theta", ROTARY_BASE), ROTARY_BASE),
        "rope_type": (kind, "default"),
        "num_key_value_heads": (config.get("num_key_value_heads", heads), heads),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "tie_word_embeddings": (config.get("tie_word_embeddings", False), True),
    }
    other = [f"{name} is {theirs!r:.40} and not {ours!r}" for name, (theirs, ours) in found.items() if theirs != ours]
    if other:
        raise ConfigError(
            f"config.json describes a Llama that our transformer cannot be: {'; '.join(other)}",
            "Name weights of a model that is shaped like ours, such as `archipelago export` writes.",
        )
