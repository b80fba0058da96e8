"""The options of every worker about what it shows of itself: logs, curves, metrics; and what follows from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe import metrics
from archipelago.broker.observe.curves import EventFile, Sink, WandbRun
from archipelago.broker.observe.logs import Origin, log_to_stderr
from archipelago.broker.process import RUN_VARIABLE

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)


@dataclass
class Endpoint:
    """Where metrics are scraped. It answers from the first, and with nothing until `families` is set."""

    families: Callable[[], Iterable[Metric]] = tuple


@dataclass(frozen=True)
class CurveOptions:
    """Of whoever writes curves."""

    tensorboard: bool = True
    """write curves as TensorBoard event files into a folder `tensorboard` in the worker's own"""
    wandb: bool = False
    """send them to Weights & Biases too: project `archipelago`, the run as group (needs the extra `wandb`)"""
    log_json: bool = False
    """log one JSON object a line: time, level, who, run, island, round, message"""

    def log_as(self, who: str, run: str | None, island: str = "") -> Origin:
        """Sets the log up; the run's name may follow."""
        run = run or os.environ.get(RUN_VARIABLE, "")
        return log_to_stderr(who, as_json=self.log_json, run=run, island=island)

    def curve_flags(self) -> list[str]:
        """The same for a process that this one starts."""
        flags = [] if self.tensorboard else ["--no-tensorboard"]
        return flags + ["--wandb"] * self.wandb + ["--log-json"] * self.log_json

    def sinks(self, run: str, name: str, kind: str, folder: Path, axis: str) -> list[Sink]:
        """Where curves go. Raises ConfigError for a package that is missing."""
        sinks: list[Sink] = []
        if self.tensorboard:
            sinks.append(EventFile(folder / "tensorboard"))
        if self.wandb:
            sinks.append(WandbRun(run, name, kind, folder, axis))
        return sinks


@dataclass(frozen=True)
class WorkerOptions(CurveOptions):
    """Of a worker, which can be scraped as well."""

    metrics_port: int | None = None
    """serve Prometheus metrics at http://HOST:PORT/metrics; 0 takes any free port; default none"""
    metrics_host: str = metrics.HOST
    """the address to serve them on; 0.0.0.0 lets other machines scrape"""

    def flags(self, number: int) -> list[str]:
        """The same for a process that this one starts, on a port of its own: `number` beyond ours."""
        if self.metrics_port is None:
            return self.curve_flags()
        port = self.metrics_port + number if self.metrics_port else 0
        return [*self.curve_flags(), "--metrics-port", str(port), "--metrics-host", self.metrics_host]

    def endpoint(self) -> Endpoint:
        """Serves metrics where that was asked for. Raises ConfigError for a port that cannot be had."""
        endpoint = Endpoint()
        if self.metrics_port is not None:
            if not 0 <= self.metrics_port <= metrics.PORT_MAX:
                raise ConfigError(f"--metrics-port cannot be {self.metrics_port}", "Choose 0 to 65535.")
            port = metrics.serve(self.metrics_port, self.metrics_host, lambda: endpoint.families())
            log.info("metrics at http://%s:%s/metrics", self.metrics_host, port)
        return endpoint
