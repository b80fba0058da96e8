"""The Python standard library's own sources as a corpus: text that every machine has."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from archipelago.broker.errors import DataError
from archipelago.islands.data.corpus import STDLIB, OpenCorpus, is_prepared, open_corpus
from archipelago.islands.data.preparation import create, fill_from_files

#: Folders that do not belong to the library, and tests, which slim installations leave out.
_OTHER_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def prepare_stdlib() -> OpenCorpus:
    """Prepare the sources of this Python's standard library, or open the corpus if it exists.

    Raises:
        DataError: This Python has no sources (`data.no-source`), or one of the errors of `create`.
    """
    if is_prepared(STDLIB):
        return open_corpus(STDLIB)
    root = Path(sysconfig.get_path("stdlib"))
    files = _sources(root)
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {root}",
            "Use a Python that is not frozen or zipped, or prepare another text with `archipelago prepare FILE`.",
            code="data.no-source",
        )
    what = f"standard library of Python {platform.python_version()}"
    return create(STDLIB, lambda writer: fill_from_files(writer, files, what))


def _sources(root: Path) -> list[Path]:
    """Return the library's sources, without tests and without `_sysconfigdata`, which differs between builds."""
    wanted = (
        path
        for path in root.rglob("*.py")
        if _OTHER_FOLDERS.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    return list(filter(Path.is_file, wanted))
