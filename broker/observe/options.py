"""Options of workers about logs, curves, probes and buckets. They also make the objects that do this work."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from archipelago.broker.buckets.folder import BucketFolder, chosen, open_bucket
from archipelago.broker.observe import probes
from archipelago.broker.observe.curves import EventFile
from archipelago.broker.observe.logs import Origin, log_to_stderr
from archipelago.broker.observe.probes import Health
from archipelago.broker.process import RUN_VARIABLE

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerOptions:
    """Options of processes that log, write metric curves and keep checkpoints."""

    tensorboard: bool = True
    """Write curves as TensorBoard event files into the worker's folder `tensorboard`."""
    log_json: bool = False
    """Log one JSON object on each line: time, level, who, run, island, round, code, message."""
    bucket: str | None = None
    """Keep copies of the newest checkpoints in RUN/ at this address, such as s3://BUCKET/FOLDER or
    gs://BUCKET/FOLDER, and restore from there what this machine does not have. The default is $ARCHIPELAGO_BUCKET.
    """

    def log_as(self, who: str, run: str | None, island: str = "") -> Origin:
        """Set up logging. The returned origin takes the run's name later if it is not known yet."""
        run = run or os.environ.get(RUN_VARIABLE, "")
        return log_to_stderr(who, as_json=self.log_json, run=run, island=island)

    def curve_flags(self) -> list[str]:
        """Return the flags that give a child process the same options about logs and curves."""
        flags = [] if self.tensorboard else ["--no-tensorboard"]
        return flags + ["--log-json"] * self.log_json

    def event_file(self, folder: Path) -> EventFile | None:
        """Return the event files of a worker's curves in its folder; None if there are to be none."""
        return EventFile(folder / "tensorboard") if self.tensorboard else None

    def flags(self) -> list[str]:
        """Return the flags that give a child process the same options."""
        return [*self.curve_flags(), *(["--bucket", self.bucket] if self.bucket else [])]

    def bucket_folder(self, *names: str) -> BucketFolder | None:
        """Return this worker's folder in the bucket, after a test write; None without a bucket. Raises BucketError."""
        address = chosen(self.bucket)
        return open_bucket(address, *names) if address else None


@dataclass(frozen=True)
class ProbeOptions:
    """Options of processes that answer the probes of an orchestrator."""

    probe_port: int | None = None
    """Answer the probes /healthz and /readyz of an orchestrator on this port. 0 takes a free port."""
    probe_host: str = probes.HOST
    """The address to answer probes on. 0.0.0.0 lets other machines ask."""

    def answer_probes(self, health: Health) -> None:
        """Answer probes from now on, if a port was asked for. Raises ConfigError for one that cannot be used."""
        if self.probe_port is not None:
            port = probes.serve(self.probe_port, self.probe_host, health)
            log.info("probes at http://%s:%s%s", self.probe_host, port, probes.READY)
