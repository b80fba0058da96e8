"""`archipelago serve-weights`: keep a folder with the newest versions of a run's parameters, for inference engines."""

from __future__ import annotations

import filecmp
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from archipelago.broker.errors import ConfigError, require_number
from archipelago.broker.files import make_untracked, stage_of, sync
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import print_json
from archipelago.islands.user_loop.following import follow
from archipelago.ops.run_source import ITS_REDIS
from archipelago.ops.settings import say
from archipelago.ops.weights.export import RunParameters, write
from archipelago.ops.weights.safetensors_files import OWN_KIND, read_config

#: The names of the folders of versions, and of the link to the newest one.
PREFIX, LATEST = "weight_v", "latest"


@dataclass(frozen=True)
class ServeWeightsOptions:
    """Keep a folder with the newest parameters of a run while it trains, one folder of safetensors for each version.

    The link `latest` leads to the newest one. Each folder appears whole. The number in its name says how many rounds
    are merged in it. In a run with one shard, that is the number of the last one. A write that fails ends this process.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The folder, in which `weight_v000012` and others are made."""
    url: Annotated[str | None, tyro.conf.Positional] = None
    """The URL of the Redis or of a replica of it, or a join file. The default is $ARCHIPELAGO_URL."""
    run: str | None = None
    """The name of the run. The default is $ARCHIPELAGO_RUN, or the only run there."""
    keep: int = 3
    """How many versions to keep. A reader has the time of as many versions to read one."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype of the numbers in the files."""
    wait_seconds: float = 30.0
    """How many seconds to wait at the start for a Redis that does not answer."""
    json: bool = False
    """Print one JSON object for each version."""


def main(options: ServeWeightsOptions) -> int:
    require_number("--keep", options.keep, "Keep 1 version or more.", 1)
    make_untracked(options.folder)
    with follow(options.url, options.run, wait_seconds=options.wait_seconds) as listener:
        _require_own(options.folder, listener.manifest)
        for version in listener:
            target = options.folder / f"{PREFIX}{version.round:06d}"
            found = RunParameters(listener.manifest, version.params, version.round, version.step, ITS_REDIS)
            write(found, new := stage_of(target), options.dtype)
            _put(new, target)
            publish(target, options.keep)
            if options.json:
                print_json({"round": version.round, "step": version.step, "folder": str(target)})
            else:
                say(f"round {version.round:,}, step {version.step:,}: {target}")
    return 0


def publish(target: Path, keep: int) -> None:
    """Let the link lead to this version, and delete all but it and the last ones before. A reader sees no folder torn.

    Later ones are of rounds that the run lost when it went back to a checkpoint.
    """
    folder, link = target.parent, stage_of(target.with_name(LATEST))
    link.symlink_to(target.name)
    link.replace(folder / LATEST)
    sync(folder)
    versions = _versions(folder)
    kept = versions[: versions.index(target) + 1][-keep:]
    for old in [each for each in versions if each not in kept]:
        hidden = old.rename(stage_of(old))  # deleted later if this process dies here
        shutil.rmtree(hidden, ignore_errors=True)


def _put(new: Path, target: Path) -> None:
    """Let a new folder have this name. One that is there with the same bytes stays, because a reader may use it."""
    if target.exists() and _is_same(new, target):
        shutil.rmtree(new)
        return
    lost = stage_of(target)
    if target.exists():  # of a round that the run has lost
        target.rename(lost)
    new.rename(target)
    shutil.rmtree(lost, ignore_errors=True)


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two folders have the same files with the same bytes."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names[0])


def _versions(folder: Path) -> list[Path]:
    """Return the folders of versions, the oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def _require_own(folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError (`export.exists`) if the folder has versions of another run."""
    for path in _versions(folder)[-1:]:
        own = read_config(path).get(OWN_KIND)
        held = own if isinstance(own, dict) else {}
        if (held.get("run"), held.get("uid")) != (manifest.run, manifest.uid):
            which = "an earlier run" if held.get("run") == manifest.run else "another run than"
            raise ConfigError(
                f"{os.fspath(folder)} has weights of {which} {manifest.run!r}",
                "Name another folder, or delete it.",
                code="export.exists",
            )
