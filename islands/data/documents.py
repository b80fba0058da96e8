"""Documents: which files of a folder are text, and which of them are held out.

A document is a file. Files of more than 16 MiB are cut into blocks, and each block is a document. The hash of a
document's bytes decides whether it is trained on or held out. So the choice depends on no name, no order and no
machine, and another file in the folder moves no document.

A small folder may have too few documents: then one split would be empty or too large. In that case all files are cut
into smaller blocks, and at last the end of the text is held out.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from archipelago.broker.observe.progress import progress
from archipelago.islands.data.tokenizer import character_start

#: The largest documents, in bytes. A smaller limit is tried while a held-out split is too small or too large.
LIMITS = (16 << 20, 64 << 10, 4 << 10)
#: The share of the documents that is trained on. The rest is held out: half for validation, half for the test.
TRAINED = 0.90
#: The least and the largest share of the text that each held-out split may have.
LEAST, MOST = 0.01, 0.20
BINARY, EMPTY, HIDDEN, NOT_UTF8, UNREADABLE = "binary", "empty", "hidden", "not UTF-8", "unreadable"
NO_FOLDER, LINKED = "unreadable folders", "links to folders"
_RANGE = 1 << 64


@dataclass(frozen=True)
class Reading:
    """What was read to make a corpus, for its card.

    Attributes:
        files: The files of text that were read.
        skipped: The number of files that were skipped, by reason.
        limit: The size of the largest documents in bytes. 0 if the end of the text is held out instead of documents.
    """

    files: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    documents: int = 0
    held_out: int = 0
    limit: int = 0

    def describe(self) -> str:
        why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.skipped.items()))
        files, skipped = "file" if self.files == 1 else "files", sum(self.skipped.values())
        text = f"{self.files:,} {files} read, {skipped:,} skipped{f' ({why})' if why else ''}"
        if not self.limit:
            return f"{text}; the last tenth of the text is held out"
        what = "documents" if self.limit == LIMITS[0] else f"blocks of at most {self.limit >> 10} KiB"
        return f"{text}; {self.held_out:,} of {self.documents:,} {what} are held out"


@dataclass(frozen=True)
class Document:
    """A file, or a part of one from the byte `start` on. `digest` is the BLAKE2b-128 of its bytes."""

    path: Path
    start: int
    size: int
    digest: bytes

    @property
    def split(self) -> int:
        """0 if it is trained on, 1 if it is for validation, 2 for the test."""
        place = int.from_bytes(self.digest[:8], "big") / _RANGE
        return 0 if place < TRAINED else 1 if place < (1 + TRAINED) / 2 else 2


@dataclass(frozen=True)
class Choice:
    """The documents of each split of a corpus, in the order in which they are written."""

    splits: tuple[tuple[Document, ...], ...]
    reading: Reading

    def write(self, target: BinaryIO) -> tuple[int, ...]:
        """Write the documents, split after split, with a newline between files. Return the size of each split."""
        sizes, last = [], None
        for documents in self.splits:
            before = target.tell()
            for document in documents:
                if last is not None and document.path != last:
                    target.write(b"\n")
                with document.path.open("rb") as file:
                    file.seek(document.start)
                    target.write(file.read(document.size))
                last = document.path
            sizes.append(target.tell() - before)
        return tuple(sizes)


def visible_files(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Return the files of a folder, and how many files and folders are left out, by the reason in words."""
    skipped = Counter[str]()
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=lambda _: skipped.update([NO_FOLDER])):
        skipped.update(LINKED for name in folders if os.path.islink(Path(place, name)))  # noqa: PTH114 - it raises nothing
        for path in (Path(place, name) for name in names):
            try:
                is_file = path.is_file()
            except OSError:
                skipped[UNREADABLE] += 1
                continue
            is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            skipped.update([HIDDEN] if is_file and is_hidden else [])
            found += [path] if is_file and not is_hidden else []
    return found, skipped


def choose(files: Sequence[Path], skipped: Mapping[str, int] | None = None, holds_out: bool = True) -> Choice:
    """Read all files, and choose the documents that are held out.

    Args:
        files: The files, in any order.
        skipped: How many files and folders were left out before, by the reason in words.
        holds_out: False holds out the end of the text, as in the published splits of single files.
    """
    left_out = Counter(skipped or {})
    wanted: Sequence[Path] = files
    texts: list[list[Document]] = []
    ordered: list[Document] = []
    for limit in LIMITS if holds_out else LIMITS[:1]:
        texts = []
        with progress("reading the files", len(wanted)) as reading:
            for path in wanted:
                found = documents_of(path, limit)
                if isinstance(found, str):
                    left_out[found] += 1
                else:
                    texts.append(found)
                reading.done += 1
        wanted = [documents[0].path for documents in texts]
        # The order depends on the contents alone, so that names do not change the corpus.
        ordered = [document for documents in sorted(texts, key=_digest_of_file) for document in documents]
        if holds_out and _is_balanced(ordered):
            splits = tuple(tuple(document for document in ordered if document.split == split) for split in range(3))
            held_out = len(splits[1]) + len(splits[2])
            return Choice(splits, Reading(len(texts), dict(left_out), len(ordered), held_out, limit))
    return Choice((tuple(ordered),), Reading(len(texts), dict(left_out), len(ordered)))


def documents_of(path: Path, limit: int) -> list[Document] | str:
    """Return the documents of a file, or why it is skipped."""
    out, start, is_blank = [], 0, True
    try:
        with path.open("rb") as file:
            for block in blocks(file, limit):
                if b"\0" in block:
                    return BINARY
                block.decode("utf-8")
                is_blank = is_blank and not block.strip()
                out.append(Document(path, start, len(block), _digest(block)))
                start += len(block)
    except UnicodeDecodeError:
        return NOT_UTF8
    except OSError:
        return UNREADABLE
    return EMPTY if is_blank else out


def blocks(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """Read the rest of a file in blocks of at most `limit` bytes, cut after paragraphs, else lines, else characters."""
    rest = b""
    while len(data := rest + file.read(limit + 1 - len(rest))) > limit:
        end = data.rfind(b"\n\n", limit // 2, limit) + 2
        if end < 2:
            end = data.rfind(b"\n", 0, limit) + 1 or character_start(data, limit) or limit
        yield data[:end]
        rest = data[end:]
    if data:
        yield data


def _is_balanced(documents: Sequence[Document]) -> bool:
    sizes = [0, 0, 0]
    for document in documents:
        sizes[document.split] += document.size
    whole = sum(sizes)
    return whole > 0 and all(LEAST * whole <= size <= MOST * whole for size in sizes[1:])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _digest_of_file(documents: Sequence[Document]) -> bytes:
    return documents[0].digest if len(documents) == 1 else _digest(b"".join(each.digest for each in documents))
