"""Users' tasks: our worker trains them, leases their shards, and says what is wrong with them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago import Task
from archipelago.broker.config import DataConfig, InnerConfig, ModelConfig
from archipelago.broker.errors import ArchipelagoError, ConfigError, MismatchError
from archipelago.islands.evaluation import published
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.evaluator import mean_of
from archipelago.islands.tasks.batches import TaskRun, _warn_of_repeats
from archipelago.islands.tasks.model import TaskModel
from archipelago.islands.tasks.task import load_task, task_of
from archipelago.islands.tasks.workload import Workload, require_trainable, task_config
from tests.failing import failing
from tests.islands.tasks.task_runs import BATCHES, CONFIG, SHARDS, TASK, TaskedRun, batches, file_of, init, loss


def test_islands_train_a_task_and_its_cursors_follow_what_was_merged() -> None:
    run = TaskedRun()
    assert [tensor.name for tensor in run.manifest.tensors] == ["embedding", "layers.0.kernel"]
    assert [tensor.kind for tensor in run.manifest.tensors] == ["embedding", "rest"]
    assert run.manifest.task == "mine"
    one, two = run.island("a"), run.island("b")
    first = published(run.transport, run.manifest)[0]
    for turn in range(40):
        run.play(one, 1)
        run.play(two, 1)
        assert turn or run.transport.reader.cursors() == {}
    assert run.merger.rounds.closed > 10
    last = published(run.transport, run.manifest)[0]
    assert np.abs(last["layers.0.kernel"]).sum() < np.abs(first["layers.0.kernel"]).sum()
    assert one.totals.tokens == 400
    read = {name: number * BATCHES + place for name, (number, place) in run.transport.reader.cursors().items()}
    trained = one.totals.steps + two.totals.steps
    assert trained - 12 <= sum(read.values()) <= trained, "all batches but those of the last stride count"
    assert max(read.values()) - min(read.values()) <= 2 * BATCHES
    assert len(read) == SHARDS, "all shards were read before one was read twice"
    held, others = ({place.range for place in each.batches.positions()} for each in (one, two))
    assert not held & others


def test_a_schedule_of_the_users_optimiser_follows_the_clock_of_the_run() -> None:
    task = replace(TASK, optimizer=optax.chain(optax.trace(0.5), optax.scale_by_schedule(lambda count: count)))
    model = TaskModel(file_of(task), 0)
    params = model.init()
    ones = {name: jnp.ones_like(leaf) for name, leaf in params.items()}
    state = model.first_state(params)
    state = model.descent()(InnerState(params, state.optimizer), ones, jnp.int32(100), jnp.int32(1))
    np.testing.assert_array_equal(state.params["layers.0.kernel"], params["layers.0.kernel"] + 100)
    state = model.descent()(state, ones, jnp.int32(3), jnp.int32(1))
    np.testing.assert_array_equal(state.params["layers.0.kernel"], params["layers.0.kernel"] + 104.5)


def test_an_optimiser_of_optax_trains_and_is_handed_to_a_newcomer() -> None:
    run = TaskedRun(replace(TASK, optimizer=optax.inject_hyperparams(optax.adam)(lambda count: 0.01)))
    one = run.island("a")
    run.play(one, 12)
    assert run.merger.rounds.closed > 2
    leaves = jax.tree.leaves(one.inner.optimizer)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any(np.any(leaf != 0) for leaf in leaves)
    assert np.isnan(one.learning_rate)


def test_other_iterables_are_told_to_repeat_data(caplog: pytest.LogCaptureFixture) -> None:
    run = TaskedRun(replace(TASK, batches=lambda run: itertools.repeat({"x": np.ones((2, 3), np.float32)})))
    island, other = run.island(), run.island("b")
    _warn_of_repeats.cache_clear()
    with caplog.at_level(logging.WARNING):
        run.play(island, 3)
        other.batches.next(1)
    assert len([record for record in caplog.records if "repeat data" in record.message]) == 1
    assert island.batches.positions() == ()


def test_an_evaluation_of_a_task_gives_its_loss() -> None:
    run = TaskedRun()
    found = mean_of(Workload.of(run.file, run.manifest.config).require_evaluation()(run.island().inner.params))
    assert [*found] == pytest.approx([2.5 / np.log(2.0), 0.5])


# -- mistakes ----------------------------------------------------------------------------------------------------------

GOOD = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from archipelago import Task
def init(seed): return {"w": jnp.ones((3, 2))}
def loss(params, batch): return jnp.mean(batch @ params["w"])
def while_loop(loss): return jax.lax.while_loop(lambda x: x < 3, lambda x: x * 2, loss)  # has no gradient
def batches(run):
    while True: yield np.ones((4, 3), np.float32)
"""
#: A file's end, and the code of its error.
MISTAKES = [
    ("", "task.name"),
    ("task = Task", "task.name"),
    ("1 / 0", "task.import"),
    ("def", "task.import"),
    ("task = Task({}, loss, batches)", "task.init"),
    ("task = Task(lambda seed: 1 / 0, loss, batches)", "task.init"),
    ("task = Task(lambda seed: {'w': np.ones(3, int)}, loss, batches)", "loop.nothing"),
    ("task = Task(lambda seed: {'w': np.ones(3)}, loss, batches)", "loop.dtype"),
    ("task = Task(lambda seed: jnp.ones(3), loss, batches)", "loop.unnamed"),
    ("task = Task(init, lambda params, batch: batch @ params['w'], batches)", "task.loss"),
    ("task = Task(init, lambda params, batch: jnp.int32(3), batches)", "task.loss"),
    ("task = Task(init, lambda params, batch: params['v'], batches)", "task.loss"),
    ("task = Task(init, lambda params, batch: loss(params, batch) / 0.0, batches)", "task.loss"),
    ("task = Task(init, loss, lambda run: 3)", "task.batches"),
    ("task = Task(init, loss, lambda run: [])", "task.batches"),
    ("task = Task(init, loss, lambda run: ['text'])", "task.batches"),
    ("task = Task(init, loss, lambda run: run.shards(0))", "task.shards"),
    ("task = Task(init, loss, batches, optimizer='adam')", "task.optimizer"),
    ("task = Task(init, loss, batches, optimizer=optax.GradientTransformation(None, None))", "task.optimizer"),
    (
        "task = Task(init, loss, batches, optimizer=optax.GradientTransformation("
        "lambda params: jnp.int32(0), lambda gradients, state, params: (gradients, state * 0.5)))",
        "task.optimizer",
    ),
    ("task = Task(init, loss, lambda run: [{1: np.ones(2), 'x': np.ones(2)}])", "task.batches"),
    ("task = Task(init, loss, lambda run: [np.zeros(2, 'i4,f4')])", "task.batches"),
    ("task = Task(init, loss, batches, tokens=0)", "task.tokens"),
    ("task = Task(init, lambda params, batch: while_loop(loss(params, batch)), batches)", "task.loss"),
    ("task = Task(init, loss, lambda run: (None for shard in run.shards(4) if False))", "task.shards"),
    ("task = Task(init, loss, lambda run: zip(run.shards(2), run.shards(2)))", "task.shards"),
    ("task = Task(init, loss, batches, tokens=2**40)", "task.tokens"),
    ("task = Task(init, loss, batches, tokens=lambda batch: np.float32(np.nan))", "task.tokens"),
    ("task = Task(init, loss, batches, kinds='(')", "loop.argument"),
    ("task = Task(init, loss, batches, evaluate=lambda params: 1 / 0)", "task.evaluate"),
    ("task = Task(init, loss, batches, evaluate=lambda params: {'accuracy': 0.5})", "task.evaluate"),
]


def test_a_mistake_in_a_task_is_one_error(tmp_path: Path) -> None:
    for number, (end, code) in enumerate(MISTAKES):
        path = tmp_path / f"wrong_{number}.py"
        path.write_text(GOOD + end)
        with pytest.raises(ArchipelagoError) as caught:
            file = load_task(str(path))
            require_trainable(Workload.of(file, task_config(CONFIG, file)))
        assert caught.value.code == code, end


def test_an_error_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(GOOD + "def bad(seed):\n    return {}['w']\nmine = Task(bad, loss, batches)\n")
    file = load_task(f"{path}:mine")
    with pytest.raises(ConfigError) as caught:
        require_trainable(Workload.of(file, CONFIG))
    assert "line 13" in caught.value.what
    assert caught.value.__suppress_context__


def test_a_file_or_a_name_that_is_not_there_is_one_error() -> None:
    for flag in ("", "nothing.py", "nothing.py:task", "task", "a.txt:task", "a.py:"):
        with failing(ConfigError, "task.file"):
            load_task(flag)


def some(*shapes: tuple[int, ...]) -> Any:
    """Return batches of these shapes, which end."""

    def few(run: TaskRun) -> Iterator[dict[str, Any]]:
        yield from ({"x": np.ones(shape, np.float32)} for shape in shapes)

    return few


def test_batches_that_end_or_change_end_the_island() -> None:
    for supply in (some((2, 3)), some((2, 3), (1, 3))):
        run = TaskedRun(replace(TASK, batches=supply))
        with failing(ConfigError, "task.batches"):
            run.play(run.island(), 3)


def test_a_loader_may_fill_the_same_array_again() -> None:
    def counted(run: TaskRun) -> Iterator[dict[str, Any]]:
        buffer = np.zeros(2, np.float32)
        for _ in itertools.count():
            buffer += 1.0
            yield {"x": buffer}

    supply = Workload.of(file_of(replace(TASK, batches=counted)), CONFIG).supply(TaskRun("a", 0))
    assert supply.sample(2)["x"].tolist() == [[1.0, 1.0]] * 2
    assert supply.next(3)["x"].tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert supply.next(1)["x"].tolist() == [[4.0, 4.0]]


def test_a_loss_may_be_an_object_without_a_hash() -> None:
    @dataclass
    class Scaled:
        by: float

        def __call__(self, params: Any, batch: Any) -> Any:
            return self.by * loss(params, batch)[0]

    task = replace(TASK, loss=Scaled(2.0))
    work = Workload.of(file_of(task), CONFIG)
    require_trainable(work)
    assert Workload.of(file_of(task), CONFIG).steps is work.steps, "it is compiled once"
    assert Workload.of(file_of(replace(TASK, loss=Scaled(2.0))), CONFIG).steps is not work.steps


def test_a_worker_with_another_tree_or_task_is_refused() -> None:
    run = TaskedRun()
    other = file_of(Task(lambda seed: {**init(seed), "more": jnp.ones(3)}, loss, batches))
    with failing(MismatchError, "loop.other-tensors"):
        run.island("b", other)
    with failing(ConfigError, "task.other"):
        task_of(None, run.manifest, "A test")


def test_an_island_whose_data_has_another_number_of_shards_is_refused() -> None:
    run = TaskedRun()
    run.play(run.island("a"), 2)
    edited = file_of(replace(TASK, batches=lambda run: batches(SimpleNamespace(shards=lambda _: run.shards(16)))))  # type: ignore[arg-type]
    with failing(MismatchError, "task.shards"):
        run.play(run.island("b", edited), 1)
    run.play(run.island("c"), 1)


def test_a_run_says_which_task_it_trains(tmp_path: Path) -> None:
    run, path = TaskedRun(), tmp_path / "yours.py"
    path.write_text(GOOD + "task = Task(init, loss, batches)\nnamed = Task(init, loss, batches, name='mine')")
    with failing(MismatchError, "task.other"):
        task_of(str(path), run.manifest, "A test")
    found = task_of(f"{path}:named", run.manifest, "A test")
    assert found is not None
    assert found.name == "mine"
    with failing(ConfigError, "task.other"):
        task_of(str(path), replace(run.manifest, task=""), "A test")


def test_settings_that_would_change_nothing_are_refused() -> None:
    for useless in (
        replace(CONFIG, model=ModelConfig("small")),
        replace(CONFIG, data=DataConfig(batch_size=4)),
    ):
        with failing(ConfigError, "config.value"):
            task_config(useless, file_of())
    own = file_of(replace(TASK, optimizer=optax.sgd(0.1)))
    with failing(ConfigError, "config.value"):
        task_config(replace(CONFIG, inner=InnerConfig(beta1=0.8)), own)
    given = replace(CONFIG, inner=InnerConfig(steps=77))
    assert task_config(given, own).inner == InnerConfig(steps=77)
    again = task_config(given, own)
    assert task_config(again, own) == again, "the config of a run can be given again"


def test_leaves_that_are_not_trained_have_their_values_though_shapes_are_given() -> None:
    shapes = jax.eval_shape(lambda: init(0))
    work = Workload.of(file_of(replace(TASK, shapes=shapes)), CONFIG)
    assert work.model.tree(work.model.init())["calls"] == 7


def test_shapes_that_are_not_those_of_init_are_named() -> None:
    task = replace(TASK, init=lambda seed: {"kernel": jnp.zeros((4, 2))})
    for name, rows, dtype in (("kernel", 5, jnp.float32), ("kernel", 4, jnp.bfloat16), ("other", 4, jnp.float32)):
        shapes = {name: jax.eval_shape(partial(jnp.zeros, (rows, 2), dtype))}
        with failing(ConfigError, "task.init"):
            Workload.of(file_of(replace(task, shapes=shapes)), CONFIG).model.init()
    same = file_of(replace(task, shapes={"kernel": jax.eval_shape(partial(jnp.zeros, (4, 2)))}))
    assert Workload.of(same, CONFIG).model.init().keys() == {"kernel"}
