"""The files of the dashboard's page, and the chart library."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from archipelago.broker.errors import ConfigError
from archipelago.broker.machine import install_hint, is_installed

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/charts.js": "charts.js"}


def chart_library() -> Path:
    """Return plotly.min.js of the installed package, without importing it.

    Raises:
        ConfigError: plotly is not installed.
    """
    if is_installed("plotly"):
        found = importlib.util.find_spec("plotly")
        path = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
        if path is not None and path.is_file():
            return path
    raise ConfigError("charts need plotly, which this Python does not have", install_hint("dash"), code="config.extra")
