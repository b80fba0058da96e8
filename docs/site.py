"""Hooks of mkdocs: pages beside `docs` join the site, guides come first in its search, and flags stay on one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that lie beside `docs`, with links as from inside."""
    from mkdocs.structure.files import File

    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        text = (Path(config.docs_dir).parent / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rank what a user does before what was measured or changed. Front matter would show on GitHub."""
    folder = page.file.src_uri.partition("/")[0]
    page.meta["search"] = {"boost": {"guide": 4, "reference": 2}.get(folder, 0.1)}
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Keep a word of code such as --resume on one line: a browser ends lines after hyphens. A long word may break."""

    def kept(code: re.Match[str]) -> str:
        return re.sub(r"(?<!\S)(?=\S*-)\S{1,30}(?!\S)", r'<span class="word">\g<0></span>', code[0])

    return re.sub("(?<=<code>)[^<]+(?=</code>)", kept, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Fail if a page loads a script from elsewhere: without a network, the search was hidden."""
    from mkdocs.exceptions import PluginError

    if found := re.search(r'<script[^>]*\bsrc="?(https?://[^" >]+)', output):
        raise PluginError(f"{page.file.src_uri} loads {found[1]}. Bring the script into docs/.")
    return output
