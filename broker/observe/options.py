"""Options of workers about logs, curves and metrics. They also make the objects that do this work."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.buckets.folder import BucketFolder, chosen, open_bucket
from archipelago.broker.machine import install_hint
from archipelago.broker.observe import metrics
from archipelago.broker.observe.curves import EventFile, has_tensorboard
from archipelago.broker.observe.logs import Origin, log_to_stderr
from archipelago.broker.observe.metrics import Health
from archipelago.broker.process import RUN_VARIABLE

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CurveOptions:
    """Options of processes that log and write metric curves."""

    tensorboard: bool = field(default_factory=has_tensorboard)
    """Write curves as TensorBoard event files into the worker's folder `tensorboard` (needs the extra `plots`)."""
    log_json: bool = False
    """Log one JSON object on each line: time, level, who, run, island, round, code, message."""

    def log_as(self, who: str, run: str | None, island: str = "") -> Origin:
        """Set up logging. The returned origin takes the run's name later if it is not known yet."""
        run = run or os.environ.get(RUN_VARIABLE, "")
        return log_to_stderr(who, as_json=self.log_json, run=run, island=island)

    def curve_flags(self) -> list[str]:
        """Return the flags that give a child process the same options."""
        flags = [] if self.tensorboard else ["--no-tensorboard"]
        return flags + ["--log-json"] * self.log_json

    def event_file(self, folder: Path) -> EventFile | None:
        """Return the event files of a worker's curves in its folder; None if there are to be none."""
        if self.tensorboard and not has_tensorboard():
            log.warning("curves are off: tensorboardX is not installed. %s", install_hint("plots"))
        return EventFile(folder / "tensorboard") if self.tensorboard and has_tensorboard() else None


@dataclass(frozen=True)
class WorkerOptions(CurveOptions):
    """Options of workers that can also be scraped by Prometheus."""

    metrics_port: int | None = None
    """Serve Prometheus metrics at http://HOST:PORT/metrics, and the probes /healthz and /readyz. 0 takes a free port.
    Without it they are not served.
    """
    metrics_host: str = metrics.HOST
    """The address to serve metrics on. 0.0.0.0 lets other machines scrape."""
    bucket: str | None = None
    """Keep copies of the newest checkpoints, and of the record, in RUN/ at this address, such as s3://BUCKET/FOLDER or
    gs://BUCKET/FOLDER, and restore from there what this machine does not have. The default is $ARCHIPELAGO_BUCKET.
    """

    def flags(self, number: int) -> list[str]:
        """Return the flags that give a child process the same options, with a metrics port `number` above this one."""
        flags = [*self.curve_flags(), *(["--bucket", self.bucket] if self.bucket else [])]
        if self.metrics_port is None:
            return flags
        port = self.metrics_port + number if self.metrics_port else 0
        return [*flags, "--metrics-port", str(port), "--metrics-host", self.metrics_host]

    def bucket_folder(self, *names: str) -> BucketFolder | None:
        """Return this worker's folder in the bucket, after a test write; None without a bucket. Raises BucketError."""
        address = chosen(self.bucket)
        return open_bucket(address, *names) if address else None

    def registry(self, health: Health) -> CollectorRegistry | None:
        """Return a registry for this worker's metrics that is served from now on, or None if no port was asked for.

        The health answers the probes at the same port. Raises ConfigError for a port that cannot be used.
        """
        if self.metrics_port is None:
            return None
        registry = metrics.new_registry()
        port = metrics.serve(self.metrics_port, self.metrics_host, registry, health)
        log.info("metrics at http://%s:%s/metrics", self.metrics_host, port)
        return registry
