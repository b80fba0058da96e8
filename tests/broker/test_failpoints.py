"""Failpoints: they kill where they are told to, at the time they are told to, and nowhere else."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.broker.failpoints import FAILPOINTS, VARIABLE, failpoint, parse_target

ROOT = Path(__file__).parents[2]
PACKAGES = ("broker", "islands", "merger", "ops")
WALK = """
from broker.failpoints import failpoint
for n in range(3):
    failpoint("publish.placed")
    failpoint("publish.done")
    print(n, flush=True)
"""


def walked(target: str | None) -> tuple[int, str, str]:
    """Return code, output and errors of a process that comes by two failpoints three times each."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if target is not None:
        environment[VARIABLE] = target
    found = subprocess.run([sys.executable, "-c", WALK], cwd=ROOT, env=environment, capture_output=True, text=True)
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize(
    ("target", "lines"),
    [("publish.placed", ""), ("publish.done", ""), ("publish.done:1", ""), ("publish.placed:3", "0\n1\n")],
)
def test_the_process_is_killed_there_and_then(target: str, lines: str) -> None:
    assert walked(target) == (-signal.SIGKILL, lines, "")


@pytest.mark.parametrize("target", [None, "", "commit.done", "publish.placed:4"])
def test_nothing_happens_elsewhere(target: str | None) -> None:
    assert walked(target) == (0, "0\n1\n2\n", "")


@pytest.mark.parametrize("target", ["publish", "publish.done:0", "publish.done:x", "publish.done:-1", ":1"])
def test_a_target_that_can_never_be_reached_is_an_error(target: str) -> None:
    """A crash test with a slip of the pen would pass without a crash."""
    with pytest.raises(ValueError):
        parse_target(target)
    code, lines, said = walked(target)
    assert code == 1
    assert lines == ""
    assert VARIABLE in said


def test_a_name_that_nobody_registered_is_an_error() -> None:
    with pytest.raises(ValueError):
        failpoint("nowhere")


def test_each_failpoint_is_somewhere_and_has_a_name_of_its_own() -> None:
    used = []
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
                used.append(ast.literal_eval(node.args[0]))
    assert sorted(used) == sorted(FAILPOINTS)
