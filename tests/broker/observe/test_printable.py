"""No text that came over the wire controls a terminal or forges a line of a log."""

from __future__ import annotations

import logging

import pytest

from archipelago.broker.observe.logs import log_to_stderr, say_error
from archipelago.broker.observe.printable import printable, printable_lines
from archipelago.ops.settings import say

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]x[/]\r\u202e\x9b31m\u2028evil"


@pytest.mark.parametrize("text", ["plain text", "Insel Öland, 日本, ✓", "a [bold]b[/]"])
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def harmless(shown: str) -> bool:
    return not any(character in shown for character in "\x1b\x07\r\u202e\x9b\u2028")


def test_control_characters_are_replaced() -> None:
    assert harmless(printable(HOSTILE))
    assert printable("a\nb") == "a\ufffdb"
    assert printable_lines("a\nb\tc") == "a\nb\tc"
    assert harmless(printable_lines(HOSTILE))


def test_a_message_in_a_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    try:
        log_to_stderr("island")
        logging.getLogger("archipelago.test").warning("refused: %s", f"{HOSTILE}\n12:00:00 merger all is well")
    finally:
        logging.getLogger().handlers[:] = before
    say_error(HOSTILE)
    say(HOSTILE)
    shown = capsys.readouterr().err
    assert harmless(shown)
    assert len(shown.splitlines()) == 3
