"""`archipelago generate`: print text that a run's newest parameters generate."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from archipelago.broker.errors import require_number
from archipelago.broker.observe.logs import printable_lines
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import keep_compiled, print_json
from archipelago.ops.run_source import RunSource
from archipelago.ops.settings import say
from archipelago.ops.weights.export import RunParameters, find, tokenizer_of

#: The most tokens that the model sees at once.
CONTEXT_MAX = 8192


@dataclass(frozen=True)
class GenerateOptions(RunSource):
    """Generate text with a run's newest parameters."""

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


def main(options: GenerateOptions) -> int:
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    require_number("--seed", seed, "Choose 0 to 2147483647.", most=(1 << 31) - 1)
    require_number("--tokens", options.tokens, "Choose a positive number.", 1)
    require_number("--temperature", options.temperature, "Choose 0 to 100.", most=100.0)
    keep_compiled()
    with progress("reading the parameters"):
        found = find(options.url, options.run)
    found.manifest.require_own_code("`archipelago generate`")
    origin = f"run {found.manifest.run!r} at round {found.round:,}"
    prompt = os.fsencode(options.prompt).decode("utf-8", "replace")
    pieces = generate(found, prompt, options.tokens, options.temperature, seed)
    if options.json:
        print_json({"prompt": prompt, "text": "".join(pieces), "tokens": options.tokens, "seed": seed,
                    "origin": origin})  # fmt: skip
    else:
        for piece in chain(pieces, "\n"):
            show(piece)
        say(f"{options.tokens:,} tokens, seed {seed}, by {origin}")
    return 0


def generate(found: RunParameters, prompt: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Yield the text that continues the prompt, in pieces."""
    import jax

    from archipelago.islands.models.registry import build
    from archipelago.islands.models.sampling import continuation

    config, tokenizer = found.manifest.config, tokenizer_of(found.manifest)
    start = tokenizer.encode(prompt) or tokenizer.encode("\n")
    context = max(2, min(config.data.sequence_length, CONTEXT_MAX))
    params = jax.device_put(found.params)
    endless = continuation(build(config.model).logits, params, start, context, temperature, seed)

    # A model's vocabulary may be larger than the tokenizer's.
    vocabulary = tokenizer.vocabulary
    yield from tokenizer.decode(token if token < vocabulary else 0 for token in islice(endless, tokens))


def show(piece: str) -> None:
    """Print text without control characters, and flush it."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(printable_lines(piece).encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
