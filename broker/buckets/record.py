"""Copies of a run's record in a bucket: its files never change, so a copy only adds those that are missing."""

from __future__ import annotations

from pathlib import Path

from archipelago.broker.buckets.folder import BucketFolder


def copy_record(local: Path, remote: BucketFolder) -> None:
    """Upload the files of a record that the bucket lacks, or has with another size. They never change."""
    names = sorted(path.name for path in local.glob("*.bin") if not path.name.startswith("."))
    if not names:
        return
    held = remote.files()
    for name in names:
        if held.get(name) != (local / name).stat().st_size:
            remote.upload(local / name, name)


def fetch_record(remote: BucketFolder, local: Path) -> None:
    """Download the files of a record that are missing here."""
    for name, size in sorted(remote.files().items()):
        path = local / name
        if name.endswith(".bin") and not (path.is_file() and path.stat().st_size == size):
            stage = path.with_name(f".{name}.part")
            remote.download(name, stage)
            stage.replace(path)
