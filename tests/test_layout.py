"""The layout, read from the sources: which package may import which, and that `archipelago` is this checkout."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

import archipelago
from tests.failing import failing

ROOT = Path(__file__).parents[1]
#: ops → islands | merger → broker, one way. `archipelago.pytorch` is a file of `ops/api`.
MAY_IMPORT = {
    "broker": {"broker"},
    "islands": {"islands", "broker"},
    "merger": {"merger", "broker"},
    "ops": {"ops", "islands", "merger", "broker", "pytorch"},
}
ACCELERATED = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
UNSAFE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def imported(source: str) -> set[str]:
    """Return the modules that a source imports: at the top, in functions, for type checking, and by name."""
    return set(_imports(ast.parse(source), by_name="import_module" in source or "__import__" in source))


def _imports(tree: ast.Module, *, by_name: bool) -> Iterator[str]:
    for node in ast.walk(tree) if by_name else _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not allowed"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in ("import_module", "__import__"):
                first = node.args[0]
                yield str(first.value) if isinstance(first, ast.Constant) else "?"


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements of a tree, without their expressions."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements(child)


@cache
def sources(package: str) -> dict[str, set[str]]:
    """Return the imported modules of each source file of a package, or of the tests."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return {str(path.relative_to(ROOT)): imported(path.read_text(encoding="utf-8")) for path in files}


def tops(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def ours(modules: set[str]) -> set[str]:
    """Return the packages of `archipelago`, and `tests`, to which these modules belong."""
    parts = {module.split(".")[1] for module in modules if module.startswith("archipelago.")}
    return parts | tops(modules) & {"tests"}


def test_every_form_of_import_is_found() -> None:
    source = """
import a.b as c, d
from e.f import g
if TYPE_CHECKING:
    from h import i
def late():
    import j
    class Inner:
        from k import l
    importlib.import_module("m.n"), __import__("o"), import_module(name)
"""
    assert imported(source) == {"a.b", "d", "e.f.g", "h.i", "j", "k.l", "m.n", "o", "?"}
    assert tops(imported(source)) == {"a", "d", "e", "h", "j", "k", "m", "o", "?"}


def test_imports_run_one_way() -> None:
    for package, allowed in MAY_IMPORT.items():
        for path, modules in sources(package).items():
            wrong = ours(modules) - allowed
            assert not wrong, f"{path} imports {wrong}"
            assert package == "ops" or "?" not in modules, f"{path} hides what it imports"


def test_the_broker_imports_no_jax() -> None:
    for path, modules in sources("broker").items():
        assert not tops(modules) & ACCELERATED, path


def test_only_the_redis_room_imports_redis() -> None:
    found = {path for package in MAY_IMPORT for path, m in sources(package).items() if tops(m) & {"redis", "hiredis"}}
    assert found
    assert all(path.startswith("broker/redis/") for path in found), found


def test_no_source_imports_a_folder_by_its_bare_name_or_executes_data_as_code() -> None:
    """Other distributions use the names `ops` and `broker`; ours begin with `archipelago.`."""
    for package in [*MAY_IMPORT, "tests"]:
        for path, modules in sources(package).items():
            assert not tops(modules) & (set(MAY_IMPORT) | UNSAFE), path


def test_only_one_source_imports_a_private_module_of_another_package() -> None:
    """It is pinned by `test_saves_leave_nothing_in_memory`."""
    found = {
        (path, module)
        for package in MAY_IMPORT
        for path, modules in sources(package).items()
        for module in modules
        if re.search(r"\._[a-z]", module) and not module.startswith("archipelago.")
    }
    assert {path for path, _ in found} == {"merger/checkpoint.py"}, found


def test_every_folder_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for name in MAY_IMPORT for path in (ROOT / name).rglob("__init__.py")}
    folders -= {Path("ops/api")}  # installed as `archipelago` itself
    assert set(settings["packages"]) == {"archipelago", *(".".join(("archipelago", *f.parts)) for f in folders)}


def test_the_installed_package_is_this_checkout() -> None:
    for package in MAY_IMPORT:
        found = importlib.import_module(f"archipelago.{package}").__file__
        assert found is not None
        assert Path(found).resolve() == ROOT.resolve() / package / "__init__.py"


def test_every_module_has_a_docstring() -> None:
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            assert path.read_text(encoding="utf-8").startswith('"""'), path


def loaded_by(*modules: str) -> set[str]:
    """Return the modules that a new process loads when it imports the given ones."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_commands_that_read_a_run_do_not_load_jax() -> None:
    clients = ("broker.redis.transport", "broker.memory.transport", "broker.process")
    watching = (*clients, "ops.watch.status", "ops.cli", "ops.dashboard.main", "ops.dashboard.app")
    loaded = loaded_by(*(f"archipelago.{module}" for module in watching))
    assert "archipelago.broker.redis.connection" in loaded
    assert not tops(loaded) & (ACCELERATED | {"fakeredis", "plotly"})
    assert ours(loaded) == {"broker", "ops"}


def test_workers_choose_devices_and_find_compiled_programs_before_they_load_jax() -> None:
    assert not tops(loaded_by("archipelago.merger.main", "archipelago.islands.main")) & ACCELERATED


def test_the_package_and_the_command_line_begin_without_numpy() -> None:
    """The command line sets the number of numpy's threads, which numpy reads when it is loaded."""
    assert not tops(loaded_by("archipelago")) & {"numpy", "jax", "redis", "pydantic", "tyro"}
    assert not tops(loaded_by("archipelago.ops.cli")) & {"numpy"}


def test_every_public_name_can_be_used() -> None:
    assert dir(archipelago) == sorted([*archipelago.__all__, "pytorch"])
    for name in archipelago.__all__:
        assert getattr(archipelago, name)
    assert archipelago.__version__ == version("archipelago-train")
    assert issubclass(archipelago.ConfigError, archipelago.ArchipelagoError)
    with pytest.raises(AttributeError):
        archipelago.no_such_name  # noqa: B018
    assert archipelago.connect("fakeredis://public", "demo").run == "demo"
    with failing(archipelago.ConfigError, "invitation.file"):
        archipelago.connect("none/admin.join", "demo")
    with failing(archipelago.ConfigError, "config.name"):
        archipelago.create("fakeredis://public", None, {"kernel": np.ones(3, "f4")}, steps=1)  # type: ignore[arg-type]


def test_a_pytorch_island_needs_no_jax() -> None:
    """Its own modules import torch, which may be missing here. What they share with JAX islands is imported."""
    own = set().union(*sources("islands/pytorch").values())
    assert "torch" in own
    assert not tops(own) & ACCELERATED
    named = {name for name in own if name.startswith("archipelago.") and ".pytorch." not in name}
    shared = {name.rpartition(".")[0] for name in named}
    assert "archipelago.islands.sync.adoption" in shared
    assert not tops(loaded_by(*sorted(shared))) & ACCELERATED


def test_the_names_of_the_tests_are_unique() -> None:
    """The folders of tests are not packages, so two files of the same name would be one module."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))
