"""The flags of `archipelago up`, and the mistakes in them that are found before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError, require_number
from archipelago.broker.observe import metrics
from archipelago.broker.observe.curves import require_wandb
from archipelago.broker.observe.options import WorkerOptions
from archipelago.ops.launch.administration import ADMIN_FILE
from archipelago.ops.launch.standbys import require_standbys

ISLANDS_MAX = 256


@dataclass(frozen=True)
class UpOptions(WorkerOptions):
    """Train on this machine: start a Redis (unless a URL is given), a merger and islands, and end with a report.

    Ctrl-C ends it in order. The same command continues the run.
    """

    url: Annotated[str | None, tyro.conf.Positional] = None
    """A Redis that is already running. Without one, `up` starts its own on loopback."""
    open_: Annotated[bool, tyro.conf.arg(name="open")] = False
    """Let other machines join: the Redis of `up` then talks TLS, and everyone needs an invitation (`invite`)."""
    host: str | None = None
    """With --open: an address of this machine to listen at, or the name under which others reach it. The default is
    all.
    """
    run: str = "demo"
    """The name of the run and of its folder."""
    islands: int = 3
    """The number of islands on this machine. More can join from other machines."""
    mesh: str | None = None
    """How each island uses its devices, such as data=2,fsdp=2 (docs/guide/many-devices.md). The default is all on data.
    """
    share_devices: bool = False
    """Let several islands use one accelerator. Otherwise each island gets accelerators of its own."""
    shards: int = 1
    """How many shards a new run has. One process serves all of them (docs/guide/operating.md#shards)."""
    standbys: int = 0
    """The processes that have loaded and compiled everything and replace an island that dies."""
    folder: Path = Path("runs")
    """The folder with the folders of all runs: logs, data and reports."""
    resume: bool = False
    """If the Redis does not have the run, continue from the newest checkpoint in the folder or the bucket."""
    checkpoint_every: float = 30.0
    """The seconds between two checkpoints of the whole run, merger and islands. 0 takes none."""
    merger_threads: int = 0
    """The threads of the merger that change spectra of matrices (`isotropic`). The default is its share of the cores.
    """
    evaluate_every: float = 15.0
    """The seconds between two evaluations on held-out text, by one of the islands. 0 evaluates at the end only."""
    one_process: bool = True
    """Afterwards train one process on as many tokens, for comparison."""
    metrics_port: int | None = None
    """Serve Prometheus metrics: the merger's at http://HOST:PORT/metrics, each island's at the next port."""
    task: str | None = None
    """A task of your own to train, FILE.py:NAME, in place of one of our models (docs/guide/your-training.md)."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """The weights that a new run begins with: a .safetensors file or its folder, such as `export` writes."""
    config: Path | None = None
    """A TOML file with settings. Flags override it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """Print the report as one JSON object."""


def require_sensible(options: UpOptions) -> None:
    """Raise ConfigError for options that the workers would refuse, before any of them is started."""
    if not 1 <= options.islands <= ISLANDS_MAX:
        raise ConfigError(f"--islands cannot be {options.islands}", f"Choose 1 to {ISLANDS_MAX}.", code="config.value")
    require_standbys(options.standbys)
    _require_openable(options)
    remedy = "Give a number of seconds, such as 30, or 0 for no checkpoints."
    require_number("--checkpoint-every", options.checkpoint_every, remedy)
    require_number("--merger-threads", options.merger_threads, "Give a number, or leave it out.")
    remedy = "Give a number of seconds such as 15, or 0 to evaluate at the end only."
    require_number("--evaluate-every", options.evaluate_every, remedy)
    if options.wandb:
        require_wandb()
    last = metrics.PORT_MAX - options.islands  # Each island takes a port after the merger's.
    if options.metrics_port is not None and not 0 <= options.metrics_port <= last:
        raise ConfigError(
            f"--metrics-port cannot be {options.metrics_port}", f"Choose 0 to {last}.", code="config.value"
        )
    if options.metrics_port:
        metrics.require_free(
            options.metrics_host, range(options.metrics_port, options.metrics_port + options.islands + 1)
        )


def _require_openable(options: UpOptions) -> None:
    if options.open_ and options.url:
        raise ConfigError(
            "--open starts a Redis of its own, so it takes no URL",
            "Leave out one of them. With a URL, `archipelago invite` gives others their access.",
            code="up.open-with-url",
        )
    if options.host is not None and not options.open_:
        raise ConfigError("--host needs --open", "Give both, or neither.", code="up.host-without-open")
    if not options.open_ and not options.url and (options.folder / options.run / ADMIN_FILE).exists():
        raise ConfigError(
            f"the members of the run {options.run!r} have invitations, and its Redis is open to them",
            f"Continue it with `archipelago up --open --run {options.run}`.",
            code="up.was-open",
        )
