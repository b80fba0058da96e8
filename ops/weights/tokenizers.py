"""The tokenizer that weights were trained with. Under another one, every token would mean something else to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.errors import DataError
from archipelago.ops.weights.safetensors_files import WeightFiles

if TYPE_CHECKING:
    from archipelago.islands.data.corpus import OpenCorpus
    from archipelago.islands.data.tokenizer import TextTokenizer


def require_tokenizer(files: WeightFiles, corpus: OpenCorpus) -> bool:
    """Check that a corpus was made with the tokenizer that weights were trained with.

    The weights of `archipelago export` say which it was; for others, it is the `tokenizer.json` beside them.

    Returns:
        False if the weights do not say it.

    Raises:
        DataError: It is another tokenizer (`weights.tokenizer`), or its file cannot be used.
    """
    from archipelago.islands.data.tokenizer import byte_tokenizer

    path, ours, plain = _file_of(files), corpus.open_tokenizer().meaning, byte_tokenizer().meaning
    theirs = files.tokenizer or (_read(path).meaning if path else "")
    if theirs in ("", ours):
        return bool(theirs)
    own, other = (
        "the bytes of text" if each == plain else f"tokens of the tokenizer {each}" for each in (ours, theirs)
    )
    how = "without --tokenizer" if theirs == plain else f"with --tokenizer {path or 'THEIR_TOKENIZER_JSON'}"
    raise DataError(
        f"the weights in {files.path} were trained on {other}, and the corpus {corpus.name!r} holds {own}",
        f"Prepare the text for these weights (`archipelago prepare TEXT`, {how}), and name that corpus with "
        "--data.corpus.",
        code="weights.tokenizer",
    )


def tokenizer_beside(files: WeightFiles) -> TextTokenizer:
    """Return the tokenizer in the folder of an export.

    Raises:
        DataError: It is not the one that the weights were trained with (`weights.tokenizer`), or its file is missing or
            cannot be used.
    """
    from archipelago.islands.data.tokenizer import FILE

    found = _read(_file_of(files) or files.folder / FILE)
    if files.tokenizer and found.meaning != files.tokenizer:
        raise DataError(
            f"{files.folder / FILE} is not the tokenizer that the weights were trained with ({found.meaning}, not "
            f"{files.tokenizer})",
            "Restore the file from a copy, or export the run again.",
            code="weights.tokenizer",
        )
    return found


def _file_of(files: WeightFiles) -> Path | None:
    from archipelago.islands.data.tokenizer import FILE

    path = files.folder / FILE
    return path if path.is_file() else None


def _read(path: Path) -> TextTokenizer:
    from archipelago.islands.data.tokenizer import from_file

    return from_file(path)
