"""The report: one file, from Redis, from a server that is started for it, and from a checkpoint alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.errors import ConfigError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Counters, Evaluation
from archipelago.broker.process import guarded
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.ops.commands import run
from archipelago.ops.dashboard.page_data import PAGE
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from archipelago.ops.watch import report as run_report
from archipelago.ops.watch.reading import Watcher, summarise
from archipelago.ops.watch.report import (
    SCRIPTS,
    ReportOptions,
    everything,
    html,
    of_watch,
    result_in_words,
    syncs_in_words,
)
from archipelago.ops.watch.run_view import RunView
from archipelago.ops.weights.export import find
from tests import samples
from tests.failing import failing
from tests.servers import empty_database

MANIFEST = samples.manifest()


def fill(transport: Any) -> None:
    """Write a run of one island, two rounds and two evaluations."""
    transport.create(MANIFEST, samples.first_snapshots(MANIFEST))
    transport.island.heartbeat(samples.heartbeat("oslo"))
    epoch = transport.merger.acquire("merger", 10.0)
    for number in (1, 2):
        entry = transport.island.publish(samples.contribution(sequence=number), b"payload")
        transport.merger.updates(0.0)
        transport.merger.commit(epoch, samples.commit([entry], round_number=number))
        transport.reader.record_evaluation(Evaluation(number, 4 * number, 100 * number, 1.7e9, 8.0 / number))


def inlined(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def transport(server: RedisServer) -> Iterator[RedisTransport]:
    """Return a run that is the only one in its database."""
    with empty_database(server, 5) as url:
        transport = connect(url, "sample")
        fill(transport)
        yield transport
        transport.close()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `up` leaves it, without a Redis: with report.json and a checkpoint."""
    folder = tmp_path_factory.mktemp("ended") / "runs" / "sample"
    transport = MemoryBroker().connect("sample")
    fill(transport)
    view = samples.view_of(transport)
    summary = run_report.summary(view, [(100, 6.0), (200, 5.0)], seconds=1.0)
    run_report.write(folder, summary)
    pending = samples.packed(np.zeros(MANIFEST.sizes[0], np.float32))
    image = samples.image(MANIFEST, [pending], noise=b"", tape=transport.reader.tape(99),
                          evaluations=transport.reader.evaluations())  # fmt: skip
    CheckpointStore(folder / "merger" / "checkpoints").save(image)
    return folder


def test_a_report_from_redis(
    server: RedisServer, transport: RedisTransport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url.removesuffix("/0") + "/5"
    path = tmp_path / "new" / "it.html"
    assert guarded(lambda: run(["report", url, "--out", str(path), "--json"])) == 0
    printed = json.loads(capsys.readouterr().out)
    text = path.read_text(encoding="utf-8")
    found = inlined(text)
    password = urlsplit(url).password
    assert password
    assert password not in text + json.dumps(printed)
    assert printed["file"] == str(path)
    assert printed["page"]["rounds"] == found["page"]["rounds"] == 2
    assert found["charts"]["held_out"]["loss"] == [8, 4]
    assert [island["name"] for island in found["page"]["islands"]] == ["oslo"]
    expected = vars(samples.view_of(transport))
    for name in ("rounds", "step", "known", "live", "participating", "tokens_merged", "tokens_trained", "pending"):
        assert found["page"][name] == expected[name], name


def test_the_file_loads_nothing_and_data_cannot_end_its_element() -> None:
    transport = MemoryBroker().connect("sample")
    fill(transport)
    text = html(of_watch(Watcher(transport)), "var Plotly = '</script><!--';")
    assert not re.search(r'(src|href)="(?!data:,)', text)
    assert "default-src 'none'" in text
    assert text.count("</script>") == text.count("<script") == 2 + len(SCRIPTS)
    assert (PAGE / "page.css").read_text(encoding="utf-8") in text
    data = {"page": {"run": "</script><script>alert(1)</script>"}, "charts": None}
    assert inlined(html(data, "")) == data


def test_a_report_from_a_folder_without_redis(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ended.parents[1])
    assert guarded(lambda: run(["report", "sample", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "runs/sample/report.html"
    assert Path("runs/sample/report.html").exists()
    assert "*" in (ended / ".gitignore").read_text(encoding="utf-8").splitlines(), "git sees no file of a run"
    found, _ = everything(ReportOptions("sample"))
    assert found["charts"]["lines"] == everything(ReportOptions(str(ended)))[0]["charts"]["lines"]
    assert found["charts"]["lines"]["round"] == [1, 2]
    assert found["charts"]["held_out"]["loss"] == [8.0, 4.0]
    page = found["page"]
    assert (page["known"], page["live"]) == (0, 0), "only Redis knows the islands"
    counters = page["counters"]
    assert (counters.published, counters.merged, counters.refused, page["pending"]) == (4, 2, 1, 1)


def test_a_report_from_a_bucket(bucket: BucketFolder, ended: Path) -> None:
    remote = bucket.child("sample")
    store = CheckpointStore(ended / "merger" / "checkpoints")
    number = store.numbers()[-1]
    Bundles(remote.child("merger", "checkpoints")).put(number, store.path_of(number), {})
    here, folder = everything(ReportOptions(str(ended)))
    there, _ = everything(ReportOptions(remote.address))
    assert folder == ended
    assert there["charts"]["lines"] == here["charts"]["lines"]
    with failing(ConfigError, "checkpoint.missing"):
        everything(ReportOptions(bucket.child("other").address))


def test_the_password_of_a_bucket_is_not_shown() -> None:
    address = "memory://user:secret@host/runs/none"
    with failing(ConfigError, "checkpoint.missing") as report:
        everything(ReportOptions(address))
    with failing(ConfigError, "checkpoint.missing") as generate:
        find(address, None)
    assert "secret" not in f"{report.value} {generate.value}"


def test_a_report_from_a_server_that_runs_and_from_its_data(tmp_path: Path) -> None:
    options = ReportOptions(str(tmp_path / "runs" / "sample"))
    with start_server(tmp_path / "runs" / "sample" / "redis") as own:
        transport = connect(own.url, "sample")
        fill(transport)
        found, _ = everything(options)
        assert found["page"]["rounds"] == 2
        assert transport.reader.control() == {}  # The server still runs.
        transport.close()
    found, _ = everything(options)
    assert found["page"]["rounds"] == 2
    assert [island["name"] for island in found["page"]["islands"]] == ["oslo"]


def test_an_error_names_the_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def require_error(named: str, *args: str) -> None:
        capsys.readouterr()
        assert guarded(lambda: run(["report", *args])) == 2, args
        found = capsys.readouterr().err
        assert (named in found, found.count("\n")) == (True, 1), args

    with start_server(tmp_path / "runs" / "sample" / "redis"):
        require_error("", str(tmp_path / "runs" / "sample"))
    found = {"page": {"run": "../x"}}
    monkeypatch.setattr(run_report, "everything", lambda options: (found, None))
    require_error("../x", "sample")


def test_an_unreadable_report_is_ignored(tmp_path: Path) -> None:
    for text in ("[1]", "null", "{"):
        (tmp_path / run_report.SUMMARY).write_text(text)
        assert run_report.read(tmp_path) is None, text


def test_the_report_says_where_its_figures_come_from(ended: Path) -> None:
    found, _ = everything(ReportOptions(str(ended)))
    assert found["page"]["settings"]["version.jax"] == MANIFEST.versions["jax"]
    assert MANIFEST.corpus.digest in found["page"]["settings"]["corpus"]
    assert found["page"]["settings"]["config digest"] == MANIFEST.config.digest()
    assert "20.0% below one process on as many tokens (5.0000)" in found["about"][0]
    assert found["charts"]["one_process"] == [[100, 6.0], [200, 5.0]]
    assert set(found["page"]["settings"]) >= {"seed", "sync.interval", "model.size"}
    assert set(found["page"]["changed"]) <= set(found["page"]["settings"])


def trained(rounds: int, step: int) -> RunView:
    config = replace(MANIFEST.config, sync=replace(MANIFEST.config.sync, interval=24))
    view = summarise(replace(MANIFEST, config=config), [], [], Counters())
    return replace(view, rounds=rounds, fragments=6, step=step)


def test_the_result_of_a_run_in_one_sentence() -> None:
    report: dict[str, Any] = {
        "held_out_last": 2.5,
        "held_out_one_process": 2.0,
        "finished": True,
        "seconds": 90.0,
        "islands": 2,
    }
    report |= {"unit": "bits per byte", "steps": 1000, "curve": []}
    assert result_in_words(report) == (
        "finished in 90 s: 2 islands reached 2.5000 bits per byte on held-out data, "
        "25.0% above one process on as many tokens (2.0000)"
    )
    assert "above one process" in result_in_words(report | {"held_out_one_process": 0.0})
    alone = result_in_words(report | {"held_out_one_process": math.nan, "finished": False, "islands": 1})
    assert alone == "interrupted in 90 s: 1 island reached 2.5000 bits per byte on held-out data"
    small = result_in_words(report | {"held_out_last": 1.5e-4, "held_out_one_process": 1e-4})
    assert "reached 0.000150" in small and "(0.000100)" in small
    assert "nothing was evaluated" in result_in_words(report | {"held_out_last": math.nan})
    assert "is not a number" in result_in_words(report | {"held_out_last": math.nan, "curve": [[1, math.nan]]})
    early = result_in_words(report | {"held_out_step": 24})
    assert "on held-out data at step 24, the last evaluation (the logs of islands say why), 25.0%" in early
    assert result_in_words(report | {"held_out_step": 980}) == result_in_words(report)


def test_the_syncs_of_a_run_in_words() -> None:
    assert (trained(48, 192).syncs, trained(0, 0).syncs) == (8.0, 0.0), "a round synchronises one fragment"
    assert "only 1.5 syncs" in syncs_in_words(trained(9, 2000)), "the run has ended"
    assert "60 times" in syncs_in_words(trained(360, 3840))
