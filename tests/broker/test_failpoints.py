"""Failpoints kill the process at the named place and visit, and at no other."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

from archipelago.broker.failpoints import FAILPOINTS, VARIABLE

ROOT = Path(__file__).parents[2]
PACKAGES = ("broker", "islands", "merger", "ops")
WALK = """
from archipelago.broker.failpoints import failpoint
for n in range(3):
    failpoint("publish.placed")
    failpoint("publish.done")
    print(n, flush=True)
"""


def walked(target: str) -> tuple[int, str, str]:
    """Run a process that visits two failpoints three times each. Returns its exit code, output and errors."""
    environment = {**os.environ, VARIABLE: target}
    found = subprocess.run([sys.executable, "-c", WALK], cwd=ROOT, env=environment, capture_output=True, text=True)
    return found.returncode, found.stdout, found.stderr


def test_the_process_is_killed_at_the_failpoint_and_at_no_other() -> None:
    assert walked("publish.placed:3") == (-signal.SIGKILL, "0\n1\n", "")
    assert walked("publish.done") == (-signal.SIGKILL, "", "")
    assert walked("publish.placed:4") == walked("") == (0, "0\n1\n2\n", "")


def test_a_target_without_a_failpoint_is_an_error() -> None:
    """Otherwise a crash test with a misspelt failpoint would pass without a crash."""
    for target in ("publish", "publish.done:0", "publish.done:x"):
        code, lines, said = walked(target)
        assert (code, lines, "ValueError" in said) == (1, "", True), target


def test_each_failpoint_is_used_exactly_once() -> None:
    used = []
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "failpoint" in source else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
                used.append(ast.literal_eval(node.args[0]))
    assert sorted(used) == sorted(FAILPOINTS)
