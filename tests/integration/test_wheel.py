"""The wheel works without the repository, in an environment of its own and in a folder that shadows our packages."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.harness.processes import SETTINGS

ROOT = Path(__file__).parents[2]
#: Each raises when it is imported. Children that put the working directory on their path would end here.
SHADOWS = ("archipelago", "broker", "islands", "merger", "ops", "jax", "redis")
#: The settings of other tests, whose compiled programs it finds. It prepares the usual corpus itself.
SMALL = ["--islands=1", "--inner.steps=24", "--no-one-process", *(each for each in SETTINGS if "corpus" not in each)]

pytestmark = pytest.mark.full


def run(argv: list[str], cwd: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def environment() -> dict[str, str]:
    """The session's environment with the user's home, where pip finds its configuration."""
    return {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}


def test_an_installed_wheel_trains(tmp_path: Path, environment: dict[str, str]) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    run(build, tmp_path, environment)
    wheel = next((tmp_path / "dist").glob("archipelago_train-*.whl"))
    venv.create(tmp_path / "venv")
    bin_folder = tmp_path / "venv" / "bin"
    # The dependencies come from here. A path in such a file does not bring the links of an editable install with it.
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path) + "\n")
    python = str(bin_folder / "python")
    pip = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "--quiet", "--no-deps", str(wheel)], tmp_path, environment)
    own = "import archipelago; print(archipelago.__file__)"
    assert run([python, "-c", own], tmp_path, environment).startswith(str(packages))
    work = tmp_path / "work"
    for name in SHADOWS:
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise ImportError('the working directory is on the path')\n")
    private = {**environment, "HOME": str(tmp_path)}  # the user's caches stay as they are
    for name in [name for name in private if name.startswith(("PYTHON", "ARCHIPELAGO"))]:
        del private[name]
    printed = run([str(bin_folder / "archipelago"), "up", "--json", "--run=wheel", *SMALL], work, private)
    report = json.loads(printed)
    assert report["finished"]
    assert report["held_out_last"] < report["held_out_first"]
