"""The rank of a process among those of its island, and what all of them have alike."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import installed_versions

if TYPE_CHECKING:
    from archipelago.islands.options import IslandOptions

#: No island has as many hosts.
HOSTS_MAX = 4096
PORT_MAX = 65535


@dataclass(frozen=True)
class HostRank:
    """The rank of this process among those of its island, and where JAX connects them.

    Attributes:
        host: The address of the leader.
        port: The port of JAX's coordinator there.
        hosts: The number of processes.
        rank: The number of this one. The leader is 0.
    """

    host: str
    port: int
    hosts: int
    rank: int

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.rank == 0

    @property
    def address(self) -> str:
        """The address of JAX's coordinator, as `--coordinator` takes it."""
        return f"{_bracketed(self.host)}:{self.port}"


def host_rank(coordinator: str | None, hosts: int | None, rank: int | None) -> HostRank | None:
    """Return the rank of this process; None for an island of one process.

    Args:
        coordinator: `--coordinator`.
        hosts: `--hosts`.
        rank: `--host-rank`.

    Raises:
        ConfigError: Flags are missing or wrong (`config.value`).
    """
    if coordinator is None and (hosts, rank) in ((None, None), (1, None), (1, 0)):
        return None
    if coordinator is None or hosts is None or rank is None:
        raise flag_error("an island over several hosts needs --coordinator, --hosts and --host-rank", "Give all three.")
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})", coordinator)
    if not found or not 0 < int(found[2]) <= PORT_MAX:
        raise flag_error(
            f"--coordinator {coordinator!r:.80} is no address",
            "Give the first host and a free port of it, such as node0:9000.",
        )
    if not 1 <= hosts <= HOSTS_MAX:
        raise flag_error(f"--hosts is {hosts}", f"Give a number from 1 to {HOSTS_MAX}.")
    if not 0 <= rank < hosts:
        raise flag_error(
            f"--host-rank is {rank}, and the island has {hosts} hosts",
            f"Give each process another number from 0 to {hosts - 1}.",
        )
    return HostRank(found[1].strip("[]"), int(found[2]), hosts, rank) if hosts > 1 else None


def flag_error(what: str, remedy: str) -> ConfigError:
    """Return the error of flags that give a process no rank, or one that another process has."""
    return ConfigError(what, remedy, code="config.value")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# -- what all processes have alike -------------------------------------------------------------------------------------


def alike(options: IslandOptions) -> dict[str, str]:
    """Return what all processes of an island must have alike, by its name in words: flags, and versions of packages."""
    versions = (f"{name} {version}" for name, version in sorted(installed_versions().items()))
    flags = {"--run": options.run, "--mesh": options.mesh, "--batch-size": options.batch_size or None}
    return {"Python": platform.python_version(), "packages": ", ".join(versions)} | {
        flag: f"{value}" for flag, value in flags.items()
    }
