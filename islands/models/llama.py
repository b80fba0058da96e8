"""The dimensions of our dense transformers, and their tensors in other programs: above all as Hugging Face's Llama.

The architecture is the same (arXiv 2302.13971): RMSNorm before attention and MLP, rotary positions over halves, SwiGLU,
and no biases. We use as many key heads as query heads, and the embedding again as the output projection. The files
differ only in names and in the layout of projections, which are [out, in] in a Llama and [in, out] here. A PyTorch
script that trains a Llama in a run of ours uses the same table, so this module does not import JAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from archipelago.broker.errors import ConfigError

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Size:
    """The dimensions of a transformer. `hidden` is the width inside the gated MLP, about 8/3 of `width`."""

    width: int
    layers: int
    heads: int
    hidden: int


#: The dense transformers by the name of their size.
DENSE: dict[str, Size] = {
    "tiny": Size(width=64, layers=2, heads=2, hidden=176),
    "small": Size(width=128, layers=5, heads=4, hidden=344),
    "base": Size(width=512, layers=8, heads=8, hidden=1368),
    "124m": Size(width=896, layers=13, heads=14, hidden=2368),
    "1b": Size(width=2048, layers=20, heads=16, hidden=5504),
}


# -- names in other programs -------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A tensor's name under the other naming, and whether its axes are swapped there."""

    name: str
    transposed: bool = False


#: From a tensor's name in a script to its place in the run. A table need not have the names that are the same in both.
Names = Mapping[str, str | Place] | Callable[[str], str | Place]


def place_of(names: Any, name: str) -> Place:
    """Return the place in the run of a tensor by its name in the script.

    Args:
        names: What the script gives: `Names`, or None if both have the same names.
        name: The name in the script.

    Raises:
        ConfigError: `names` is neither a table nor a function, or gives no name (`loop.names`).
    """
    if names is None:
        return Place(name)
    if not callable(names) and not isinstance(names, Mapping):
        raise misnamed(f"is {names!r:.60}")
    found = names(name) if callable(names) else names.get(name, name)
    place = found if isinstance(found, Place) else Place(found)
    given: Any = place.name
    if not isinstance(given, str) or not given:
        raise misnamed(f"gives {found!r:.60} for {name!r}, which is no name")
    return place


def misnamed(what: str) -> ConfigError:
    """Return the error (`loop.names`) for names that do not fit a model."""
    return ConfigError(
        f"`names` {what}",
        "Give a table, or a function, from the names of the model's parameters to those of the run.",
        code="loop.names",
    )


# -- Llama -------------------------------------------------------------------------------------------------------------

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
_FROM_LLAMA = {llama: own for own, llama in [*_IN_LAYER.items(), *_ONCE.items()]}
_LAYER = re.compile(r"(layers\.[0-9]{1,4})\.(.+)")
#: The output projection, which is the embedding in our models.
OUTPUT = "lm_head.weight"


def to_llama(name: str) -> Place:
    """Return Llama's name of our tensor. Raises KeyError for a tensor that the dense transformer does not have."""
    found = _LAYER.fullmatch(name)
    llama = f"model.{found[1]}.{_IN_LAYER[found[2]]}" if found else _ONCE[name]
    return Place(llama, name.endswith(".kernel"))


def from_llama(name: str) -> Place:
    """Return our name of a tensor by Llama's name. Any other name is assumed to be our own."""
    found = _LAYER.fullmatch(name.removeprefix("model."))
    if found and found[2] in _FROM_LLAMA:
        own = f"{found[1]}.{_FROM_LLAMA[found[2]]}"
        return Place(own, own.endswith(".kernel"))
    return Place(_FROM_LLAMA.get(name, name), False)


def config_of(size: Size, vocabulary: int, positions: int, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of a model that was trained on `positions` tokens, in a file of that dtype."""
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
    """Return the size that a Llama's `config.json` has. Raises ConfigError (`llama.damaged`, `llama.different`)."""
    require_compatible(config)
    try:
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        size = Size(width, int(config["num_hidden_layers"]), heads, int(config["intermediate_size"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(f"{error!r:.100}") from None
    if min(size.width, size.layers, size.heads, size.hidden) < 1 or size.width % (2 * size.heads):
        raise _damaged(f"impossible dimensions {size}")
    return size


def _damaged(why: str) -> ConfigError:
    return ConfigError(
        f"config.json does not describe a Llama ({why})",
        "Put back the file that the exporting program wrote.",
        code="llama.damaged",
    )


def require_compatible(config: Mapping[str, Any]) -> None:
    """Check that our transformer computes the same as the Llama of this `config.json` with the same tensors.

    Raises ConfigError (`llama.different`), which names each setting that differs.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default")) if isinstance(rotary, Mapping) else "unknown"
    theta = rotary.get("rope_theta") if isinstance(rotary, Mapping) else None
    heads = config.get("num_attention_heads")
    settings = {
        "rms_norm_eps": (config.get("rms_norm_eps", NORM_EPSILON), NORM_EPSILON),
        "rope_theta": (theta or config.get("rope_theta", ROTARY_BASE), ROTARY_BASE),
        "rope_type": (kind, "default"),
        "num_key_value_heads": (config.get("num_key_value_heads", heads), heads),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "tie_word_embeddings": (config.get("tie_word_embeddings", False), True),
    }
    differ = [
        f"{name} is {found!r:.40} instead of {needed!r}"
        for name, (found, needed) in settings.items()
        if found != needed
    ]
    if differ:
        raise ConfigError(
            f"config.json describes a Llama that our transformer cannot represent: {'; '.join(differ)}",
            "Use the weights of a model with our architecture, such as `archipelago export` writes.",
            code="llama.different",
        )


def require_size(config: Mapping[str, Any], size: str) -> None:
    """Check that the Llama of this `config.json` computes the same as our transformer of that size.

    Args:
        size: The name of the size. Of other architectures than the dense one, no Llama is refused here, because its
            tensors differ.

    Raises:
        ConfigError: It does not (`llama.different`), or is no Llama (`llama.damaged`).
    """
    found = size_of(config)
    if size in DENSE and found != DENSE[size]:
        raise ConfigError(
            f"the Llama has {found}, and the model {size!r} of the run has {DENSE[size]}",
            "Give LlamaConfig the dimensions of the run's model.",
            code="llama.different",
        )
