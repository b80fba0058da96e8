"""A run's newest published parameters, and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipelago.broker.errors import DataError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import keep_compiled
from archipelago.broker.shards.transport import opened
from archipelago.ops.run_source import open_run

if TYPE_CHECKING:
    from archipelago.islands.data.tokenizer import TextTokenizer
    from archipelago.islands.models.registry import Params


@dataclass(frozen=True)
class RunParameters:
    """A run's newest published parameters.

    Attributes:
        manifest: The run's manifest.
        params: The parameters.
        round: The newest round that is merged into them.
        step: The run's step.
        origin: Where they were found, in words.
    """

    manifest: Manifest
    params: Params
    round: int
    step: int
    origin: str


def find(source: str | None, run: str | None) -> RunParameters:
    """Return the newest published parameters of the run that a user names (`open_run`).

    If no Redis is named, they come from its newest checkpoint.
    """
    keep_compiled()
    from archipelago.islands.evaluation import published

    with open_run(source, run) as found:
        manifest, whole = opened(found.transport)
        return RunParameters(manifest, *published(whole, manifest), found.origin)


def tokenizer_of(manifest: Manifest) -> TextTokenizer:
    """Return the tokenizer of the run's model.

    Raises:
        DataError: This machine does not have the corpus that holds it (`data.missing`), or has one of that name with
            another tokenizer (`tokenizer.different`).
    """
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.data.tokenizer import byte_tokenizer

    if not manifest.corpus.tokenizer:
        return byte_tokenizer()
    corpus = open_corpus(manifest.corpus.name)
    if corpus.tokenizer != manifest.corpus.tokenizer:
        raise DataError(
            f"the corpus {corpus.name!r} on this machine has another tokenizer than the run's",
            "Copy the run's corpus to this machine.",
            code="tokenizer.different",
        )
    return corpus.open_tokenizer()
