"""A task: what our worker needs to train a model. Our own models are tasks too (`tasks.ours`).

The file of a user's task, `FILE.py:NAME`, is imported, and what goes wrong in it becomes one clear error. This module
does not import JAX, so that a task's file decides what is loaded.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError, ConfigError, MismatchError
from archipelago.broker.manifest import NO_CORPUS, Corpus, Manifest
from archipelago.broker.redis.keys import checked_name
from archipelago.islands.user_loop.tensors import EMBEDDINGS, KindOf

if TYPE_CHECKING:
    from archipelago.islands.data.batches import Supply
    from archipelago.islands.evaluation import CorpusEvaluation
    from archipelago.islands.tasks.batches import TaskRun

#: The name that is looked up where `--task` gives a file only.
DEFAULT = "task"

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """A model with its loss and its data, for `archipelago up --task FILE.py:NAME`.

        task = Task(init, loss, batches, evaluate)

    Attributes:
        init: From a seed to the first parameters: any tree of arrays whose leaves have names. Leaves of float32,
            bfloat16 and float16 are trained and merged, in float32; `loss` gets them in their own dtype. Other
            floating-point types are refused, and all other leaves stay as they are.
        loss: From parameters and a batch to the loss to minimise, a scalar; or to a pair of the loss to report and a
            penalty that training adds to it. It is compiled and differentiated by JAX.
        batches: From a `TaskRun` to an endless iterable of batches: trees of arrays, all of the same shapes and dtypes.
            Or to a `Supply`, which draws several batches at once and says where it stands, as our own tasks do.
        evaluate: From parameters to a loss on held-out data, or to a dictionary with `loss` and, optionally,
            `accuracy` (0 … 1). Other entries are logged. Without it, the run has no held-out loss.
        optimizer: Any optax transformation, whose schedules follow the run's clock. The default is that of the run's
            settings (`--inner.optimizer`).
        kinds: Which tensors are embeddings, for which the merge rules have a setting of their own: a regular expression
            that is found in their names, or a function from a name to "embedding" or "rest".
        tokens: What a batch counts, in tokens, examples or any unit that all islands share: a number, or a function of
            a batch. The weight of an island follows from it. The default is the length of the first array.
        name: The name of the task in its run. The default is that of its file.
        shapes: The tree of `jax.ShapeDtypeStruct` that `init` fills. With it, `init` is only called to begin a
            run, and for the values of leaves that are not trained.
    """

    init: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    batches: Callable[[TaskRun], Iterable[Any] | Supply]
    evaluate: Callable[[Any], float | Mapping[str, float]] | CorpusEvaluation | None = None
    optimizer: Any = None
    kinds: str | KindOf = EMBEDDINGS
    tokens: int | Callable[[Any], int] | None = None
    name: str = ""
    shapes: Any = None


@dataclass(frozen=True)
class NamedTask:
    """A task, and what a run knows of it. Errors of our own tasks are faults of this package and stay as they are."""

    task: Task

    @property
    def name(self) -> str:
        """The name of the task in its run. It is empty for a model that the settings of the run name."""
        return self.task.name

    @property
    def data(self) -> Corpus:
        """The data that all islands must have, as the run knows it."""
        return NO_CORPUS

    def under(self, config: RunConfig) -> NamedTask:
        """Return the task with other settings of its run. That of a user does not depend on them."""
        return self

    def call(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Return what a function of the task returns. `what` names that part of the task in errors."""
        return function(*args)

    def wrong(self, what: str, fault: str, remedy: str) -> ConfigError:
        """Return the error (`task.WHAT`) for a part of the task that gives something wrong."""
        return ConfigError(f"{what} of the task {self.name!r} {fault}", remedy, code=f"task.{what}")


@dataclass(frozen=True)
class TaskFile(NamedTask):
    """A task in a user's file, under the name `variable`."""

    path: Path
    variable: str

    @property
    def name(self) -> str:
        return self.task.name or self.path.stem

    @property
    def flag(self) -> str:
        """The value of `--task` that finds this task from any folder."""
        return f"{self.path}:{self.variable}"

    def call(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Return what a function of the task returns. Raises ConfigError (`task.WHAT`) that names the failing line."""
        try:
            return function(*args)
        except ArchipelagoError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            fault = f"failed{_line_of(error, self.path)}: {_in_words(error)}"
            raise self.wrong(what, fault, f"Correct {self.path}.") from None

    def wrong(self, what: str, fault: str, remedy: str) -> ConfigError:
        return ConfigError(f"{what} of the task {self.name!r} ({self.path}) {fault}", remedy, code=f"task.{what}")


def load_task(text: str) -> TaskFile:
    """Import a task.

    Args:
        text: `FILE.py:NAME`, or `FILE.py` for the name `task`.

    Raises:
        ConfigError: There is no such file (`task.file`), importing it failed (`task.import`), it has no task of that
            name (`task.name`), or one of its parts is of a wrong type.
    """
    where, colon, variable = text.rpartition(":")
    if not colon or variable.endswith(".py"):
        where, variable = text, DEFAULT
    path = Path(where).expanduser().absolute()
    if not variable or path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f"--task {text} names no task in a Python file that is there",
            f"Give --task FILE.py:NAME, such as --task train_mine.py:task, or --task FILE.py for the name {DEFAULT!r}.",
            code="task.file",
        )
    module = _imported(path)
    task = getattr(module, variable, None)
    if not isinstance(task, Task):
        names = [name for name, value in vars(module).items() if isinstance(value, Task)]
        raise ConfigError(
            f"{variable!r} in {path} is no task",
            f"Its tasks are: {', '.join(names) or 'none'}. Write `{variable} = archipelago.Task(init, loss, batches)`.",
            code="task.name",
        )
    found = TaskFile(task, path, variable)
    _require_parts(found)
    return found


def task_of(flag: str | None, manifest: Manifest, verb: str) -> TaskFile | None:
    """Return the task that a verb needs for a run; None for a run of our models.

    Args:
        flag: The value of `--task`.
        verb: What the user called, as the beginning of a sentence.

    Raises:
        ConfigError: The run trains a task, and none was given, or it trains none (`task.other`), or scripts
            (`model.own`).
        MismatchError: It trains another one (`task.other`).
    """
    if flag is None:
        if manifest.task:
            raise ConfigError(
                f"the run {manifest.run!r} trains the users' task {manifest.task!r}",
                "Give the file of that task: --task FILE.py:NAME.",
                code="task.other",
            )
        manifest.require_own_code(verb)
        return None
    if not manifest.task:
        raise ConfigError(
            f"the run {manifest.run!r} trains no task",
            "Leave --task out, or name the run of the task with --run.",
            code="task.other",
        )
    found = load_task(flag)
    if found.name != manifest.task:
        raise MismatchError(
            "task", manifest.task, found.name,
            "Give the file of the run's task, or name another run with --run.",
            code="task.other",
        )  # fmt: skip
    return found


def _imported(path: Path) -> ModuleType:
    """Import a file as Python does with a script: its folder comes first on the path."""
    folder, name = str(path.parent), path.stem
    for known in (name, f"archipelago_task_{name}"):
        if getattr(sys.modules.get(known), "__file__", "") == str(path):
            return sys.modules[known]  # a standby loads the task before it becomes an island
    if name in sys.modules:
        name = f"archipelago_task_{name}"
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: S101 - the file ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a loader with processes of its own imports it by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be imported{_line_of(error, path)}: {_in_words(error)}",
            f"`python {path.name}` in its folder shows the whole error.",
            code="task.import",
        ) from None
    return module


def _require_parts(found: TaskFile) -> None:
    task = found.task
    if task.optimizer is not None and not all(hasattr(task.optimizer, name) for name in ("init", "update")):
        raise found.wrong("optimizer", "is not an optax transformation", "Give one, such as optax.adamw(1e-3).")
    tokens = task.tokens
    if not callable(tokens) and tokens is not None and not (hasattr(tokens, "__index__") and tokens >= 1):
        raise found.wrong("tokens", f"is {tokens!r}", "Give a whole number from 1 on, or a function of a batch.")
    checked_name(found.name, "the name of the task")


def _line_of(error: BaseException, path: Path) -> str:
    """Return the last line of the user's file that an error passed through, as words; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f" in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""


def _in_words(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said:.400}" if said else type(error).__name__
