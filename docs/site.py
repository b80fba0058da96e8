"""A hook of mkdocs: the pages beside `docs`, such as CONTRIBUTING.md, are pages of the site, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that lie beside `docs`, with links as from inside."""
    from mkdocs.structure.files import File

    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        text = (Path(config.docs_dir).parent / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files
