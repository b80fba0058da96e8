"""`archipelago generate`: print text that a run's newest parameters, or an export, generate."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from archipelago.broker.config import BYTES, OWN_MODEL, ModelConfig
from archipelago.broker.errors import ConfigError, DataError, require_number
from archipelago.broker.invitation import names_redis
from archipelago.broker.observe.logs import printable_lines
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import RunAddress, keep_compiled, print_json
from archipelago.ops.settings import say
from archipelago.ops.weights.export import find, tokenizer_of
from archipelago.ops.weights.safetensors_files import CONFIG_FILE, OWN_KIND, WeightFiles, read_config, tokenizer_beside

if TYPE_CHECKING:
    from archipelago.islands.data.tokenizer import TextTokenizer
    from archipelago.islands.models.interface import Model, Params

#: The most tokens that the model sees at once.
CONTEXT_MAX = 8192


@dataclass(frozen=True)
class GenerateOptions(RunAddress):
    """Generate text with a run's newest parameters, or with an export, which needs no Redis."""

    url: Annotated[str | None, tyro.conf.Positional] = None
    """The URL of a Redis (default $ARCHIPELAGO_URL), a join file, the name or folder of a run, or a folder that
    `archipelago export` wrote."""
    prompt: str = "\n"
    """The text to continue."""
    tokens: int = 256
    """The number of tokens to generate."""
    temperature: float = 0.8
    """Divides the logits. 0 takes the most probable token, and 100 is the most."""
    seed: int | None = None
    """Equal seeds give equal text. The default is random."""
    json: bool = False
    """Print one JSON object at the end instead of the text."""


@dataclass(frozen=True)
class TextModel:
    """A model of text, the number of tokens that it was trained to see at once, and where it comes from, in words."""

    model: Model
    params: Params
    tokenizer: TextTokenizer
    context: int
    origin: str


def main(options: GenerateOptions) -> int:
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    require_number("--seed", seed, "Choose 0 to 2147483647.", most=(1 << 31) - 1)
    require_number("--tokens", options.tokens, "Choose a positive number.", 1)
    require_number("--temperature", options.temperature, "Choose 0 to 100.", most=100.0)
    keep_compiled()
    with progress("reading the parameters"):
        text_model = open_text_model(options.url, options.run)
    prompt = os.fsencode(options.prompt).decode("utf-8", "replace")
    pieces = generate(text_model, prompt, options.tokens, options.temperature, seed)
    if options.json:
        print_json({"prompt": prompt, "text": "".join(pieces), "tokens": options.tokens, "seed": seed,
                    "origin": text_model.origin})  # fmt: skip
    else:
        for piece in chain(pieces, "\n"):
            show(piece)
        say(f"{options.tokens:,} tokens, seed {seed}, by {text_model.origin}")
    return 0


def generate(text_model: TextModel, prompt: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Yield the text that continues the prompt, in pieces."""
    from archipelago.islands.models.sampling import continuation

    start = text_model.tokenizer.encode(prompt) or text_model.tokenizer.encode("\n")
    context = max(2, min(text_model.context, CONTEXT_MAX))
    endless = continuation(text_model.model.logits, text_model.params, start, context, temperature, seed)

    # A model's vocabulary may be larger than the tokenizer's.
    vocabulary = text_model.tokenizer.vocabulary
    yield from text_model.tokenizer.decode(token if token < vocabulary else 0 for token in islice(endless, tokens))


def show(piece: str) -> None:
    """Print text without control characters, and flush it."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(printable_lines(piece).encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def open_text_model(source: str | None, run: str | None) -> TextModel:
    """Open the model of an export, of a checkpoint or of a run.

    Raises:
        ConfigError: The run trains a model of its users' own (`model.own`), or one of the errors of `find`.
        DataError: The export is damaged.
    """
    if source is not None and Path(source).is_file() and not names_redis(source):
        raise ConfigError(
            f"{source} is a file, and its folder describes the model",
            "Name the folder that `archipelago export` wrote.",
            code="export.foreign",
        )
    if source is not None and not names_redis(source) and read_config(Path(source)):
        files = WeightFiles(Path(source))
        model, context = _described(files)
        return TextModel(model, files.load(model.tensors), tokenizer_beside(files), context, source)
    found = find(source, run)
    found.manifest.require_own_code("`archipelago generate`")

    import jax

    from archipelago.islands.models.registry import build

    model, params = build(found.manifest.config.model), jax.device_put(found.params)
    origin = f"run {found.manifest.run!r} at round {found.round:,}"
    context = found.manifest.config.data.sequence_length
    return TextModel(model, params, tokenizer_of(found.manifest), context, origin)


def _described(files: WeightFiles) -> tuple[Model, int]:
    """Return the model that an export's `config.json` describes, and the tokens that it sees at once."""
    from archipelago.islands.models.registry import build

    path, own = files.folder / CONFIG_FILE, files.config.get(OWN_KIND)
    if isinstance(own, dict) and own.get("size") == OWN_MODEL:
        raise ConfigError(
            f"only the task or the scripts that trained the model in {files.folder} know how to compute it",
            "Load its tensors there (`archipelago.load`).",
            code="model.own",
        )
    if not isinstance(own, dict) or "size" not in own:
        raise ConfigError(
            f"{path} describes a {files.config.get('model_type')!r:.40}, which is not one of our models",
            "Name a folder that `archipelago export` wrote.",
            code="export.foreign",
        )
    try:
        return build(ModelConfig(str(own["size"]), int(own.get("vocabulary", BYTES)))), int(own["sequence_length"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is damaged ({error!r:.100})", "Export the run again.", code="weights.damaged"
        ) from None
