"""Copies of the files of a run of `up` in a bucket: its report, its settings and its logs."""

from __future__ import annotations

from pathlib import Path

from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.observe.progress import progress
from archipelago.ops.watch import run_summary

FILES = (run_summary.TEXT, run_summary.PICTURE, "config.toml")


def copy_run_files(folder: Path, bucket: BucketFolder) -> str:
    """Upload the report, the settings and the logs of a run.

    Returns:
        Why that failed; empty if it did not. The files are on this machine all the same.
    """
    paths = [folder / name for name in FILES] + sorted((folder / "logs").glob("*.log"))
    try:
        with progress(f"copying the report and the logs to {bucket}"):
            bucket.upload({path.relative_to(folder).as_posix(): path for path in paths if path.is_file()})
    except (BucketError, OSError) as error:
        return f"{error}"
    return ""


def fetch_run(bucket: BucketFolder, folder: Path) -> None:
    """Download the report of a run, as far as it is there. Raises BucketError."""
    held = bucket.names()
    bucket.download({name: folder / name for name in (run_summary.TEXT, run_summary.PICTURE) if name in held})
