"""The part of the HTML report that says where the run's figures come from."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape

from archipelago.ops.watch.provenance import Provenance


def cards(found: Provenance) -> str:
    """Return the sections as HTML. All text in them is escaped."""
    facts = "".join(_facts(title, rows) for title, rows in found.sections.items() if rows)
    picture = ""
    if found.picture:
        data = base64.b64encode(found.picture).decode()
        picture = (
            f'<div><h3>Loss and baseline</h3><img alt="Loss and baseline" src="data:image/png;base64,{data}"></div>'
        )
    settings = "".join(_setting(key, value, key in found.changed) for key, value in found.settings.items())
    return (
        f'<section class="card" aria-label="About this run"><div class="head"><h2>About this run</h2></div>'
        f'<div class="facts">{facts}{picture}</div></section>\n'
        f'<section class="card" aria-label="Settings"><div class="head"><h2>Settings</h2>'
        f'<p class="sub">{len(found.changed)} differ from the defaults, in bold</p></div>'
        f'<dl class="all-settings">{settings}</dl></section>\n'
        f'<section class="card" aria-label="Repeat this run"><div class="head"><h2>Repeat this run</h2></div>'
        f'<pre class="script">{escape(found.commands)}</pre></section>\n'
    )


def _facts(title: str, rows: Mapping[str, str]) -> str:
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    return f"<div><h3>{escape(title)}</h3><dl>{inner}</dl></div>"


def _setting(key: str, value: str, changed: bool) -> str:
    mark = ' class="changed"' if changed else ""
    return f"<div{mark}><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
