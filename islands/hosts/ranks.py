"""The rank of a process among those of its island, from flags or from its cluster, and what all of them have alike."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import installed_versions
from archipelago.broker.process import URL_VARIABLE

if TYPE_CHECKING:
    from archipelago.islands.options import IslandOptions

#: No island has as many hosts.
HOSTS_MAX = 4096
PORT_MAX = 65535
#: JAX looks for a cluster if one of these variables is set. Looking costs an import of JAX.
_CLUSTER_VARIABLES = (
    "SLURM_NTASKS", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "JAX_COORDINATOR_ADDRESS", "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES", "MEGASCALE_COORDINATOR_ADDRESS", "TPU_NAME",
)  # fmt: skip


@dataclass(frozen=True)
class HostRank:
    """The rank of this process among those of its island, and where they meet.

    Attributes:
        host: The address of the leader.
        port: The port on which the leader waits for the others. JAX uses the next one.
        hosts: The number of processes.
        rank: The number of this one. The leader is 0.
        local_devices: The numbers of this machine's devices that this process uses; None for all.
    """

    host: str
    port: int
    hosts: int
    rank: int
    local_devices: tuple[int, ...] | None = None

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.rank == 0

    @property
    def address(self) -> str:
        """The leader's address, as `--coordinator` takes it."""
        return f"{_bracketed(self.host)}:{self.port}"

    @property
    def jax_address(self) -> str:
        """The address of JAX's coordinator, on the leader's host."""
        return f"{_bracketed(self.host)}:{self.port + 1 if self.port < PORT_MAX else self.port - 1}"


def host_rank(
    coordinator: str | None, hosts: int | None, rank: int | None, environ: Mapping[str, str] = os.environ
) -> HostRank | None:
    """Return the rank of this process; None for an island of one process.

    Args:
        coordinator: `--coordinator`.
        hosts: `--hosts`.
        rank: `--host-rank`.
        environ: The environment.

    Raises:
        ConfigError: Flags are missing or wrong, or the cluster cannot be read (`hosts.flags`).
    """
    if hosts == 1 and coordinator is None and rank in (None, 0):
        return None
    local_devices = None
    is_asked = (coordinator, hosts, rank) != (None, None, None)
    if None in (coordinator, hosts, rank) and (is_asked or is_in_cluster(environ)):
        coordinator, hosts, rank, local_devices = _detected(coordinator, hosts, rank)
    if coordinator is None or hosts is None or rank is None:
        if is_asked:
            raise flag_error(
                "an island over several hosts needs --coordinator, --hosts and --host-rank, and no cluster was found "
                "that gives what is missing",
                "Give all three, or start the processes by Slurm, by Kubernetes or on TPU hosts.",
            )
        return None
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})", coordinator)
    if not found or not 0 < int(found[2]) <= PORT_MAX:
        raise flag_error(
            f"--coordinator {coordinator!r:.80} is no address",
            "Give the first host and a free port of it, such as node0:9000. The next port must be free, too.",
        )
    if not 1 <= hosts <= HOSTS_MAX:
        raise flag_error(f"--hosts is {hosts}", f"Give a number from 1 to {HOSTS_MAX}.")
    if not 0 <= rank < hosts:
        raise flag_error(
            f"--host-rank is {rank}, and the island has {hosts} hosts",
            f"Give each process another number from 0 to {hosts - 1}.",
        )
    return HostRank(found[1].strip("[]"), int(found[2]), hosts, rank, local_devices) if hosts > 1 else None


def flag_error(what: str, remedy: str) -> ConfigError:
    """Return the error of flags that give a process no rank, or one that another process has."""
    return ConfigError(what, remedy, code="hosts.flags")


def is_in_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether the environment may be one that jax.distributed knows, with more than one process."""
    found = {name: environ[name] for name in _CLUSTER_VARIABLES if name in environ}
    return bool(found) and found != {"SLURM_NTASKS": "1"}


def _detected(
    coordinator: str | None, hosts: int | None, rank: int | None
) -> tuple[str | None, int | None, int | None, tuple[int, ...] | None]:
    """Return what was given, and the rest as jax.distributed detects it, with the devices of this process.

    Raises:
        ConfigError: The cluster does not say what it has to (`hosts.flags`).
    """
    from jax._src.clusters import ClusterEnv  # JAX shows this by `jax.distributed.initialize` only, which never fails

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(coordinator, hosts, rank, None, None, 30)
    except Exception as error:  # each kind of cluster has its own errors
        said = " ".join(str(error).split())[:300]
        raise flag_error(
            f"the hosts of this island cannot be detected: {type(error).__name__}: {said}",
            "Give --coordinator, --hosts and --host-rank, or --hosts 1 if this process is an island of its own.",
        ) from error
    address, number, own, devices = found
    return address, number, own, None if devices is None else tuple(devices)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# -- what all processes have alike -------------------------------------------------------------------------------------


def alike(options: IslandOptions, hosts: int) -> dict[str, str]:
    """Return what all processes of an island must have alike, by its name in words: flags, and versions of packages."""
    flags = {
        "--hosts": hosts, "--run": options.run, "--mesh": options.mesh, "--corpus": options.corpus,
        "--batch-size": options.batch_size, "--micro-batches": options.micro_batches,
        "--rematerialise": options.rematerialise,
    }  # fmt: skip
    given = {flag: str(value) for flag, value in flags.items() if value}
    return {"Python": platform.python_version(), **installed_versions(), **given}


def key_of(url: str | None) -> bytes:
    """Return what the processes of an island know and strangers do not: the Redis URL, or the content of a join file.

    A Redis without a password has no secrets, so anybody who knows its address can take part.
    """
    address = url or os.environ.get(URL_VARIABLE, "")
    try:
        content = Path(address).read_bytes() if address and Path(address).is_file() else address.encode()
    except OSError:
        content = address.encode()
    return hashlib.sha256(b"archipelago hosts\0" + content).digest()
