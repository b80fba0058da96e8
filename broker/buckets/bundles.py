"""Folders of files in a bucket, each complete or absent.

A bundle has a number. Its files are uploaded first, into a folder that is named after their digests. Then comes one
small file, its manifest `NUMBER.json`, which has the size and digest of each. A bundle without its manifest does not
exist, so an upload that was cut off is never read. Two processes that write the same number do not mix their files:
they write to one folder only if all digests are the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from annotated_types import Predicate

from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.errors import fault_in
from archipelago.broker.files import staged_folder
from archipelago.broker.messages import adapter
from archipelago.broker.observe.progress import progress
from archipelago.broker.wire import digest

#: A path that names nothing outside of its folder.
Inside = Annotated[str, Predicate(lambda path: not path.startswith("/") and ".." not in path.split("/"))]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleManifest:
    """The content of a manifest: each file's size and digest by its path, and what the bundle is `about`."""

    folder: Inside
    files: Mapping[Inside, tuple[int, str]]
    about: Mapping[str, str]
    format: Literal[1] = 1


class Bundles:
    """The bundles in a folder of a bucket. Its methods raise BucketError."""

    def __init__(self, folder: BucketFolder) -> None:
        self.folder = folder

    def numbers(self) -> list[int]:
        """Return the numbers of complete bundles, ascending."""
        stems = [name.removesuffix(".json") for name in self.folder.names() if name.endswith(".json")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def manifest(self, number: int) -> BundleManifest:
        """Read a manifest. Raises BucketError (`bucket.damaged`)."""
        try:
            body = json.loads(self.folder.read(f"{number}.json"))
            if body.pop("digest") != _digest_of(body):
                raise ValueError("its digest differs")
            manifest: BundleManifest = adapter(BundleManifest).validate_python(body)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(number, f"{number}.json cannot be read: {fault_in(error)}") from None
        return manifest

    def put(self, number: int, source: Path, about: Mapping[str, str]) -> None:
        """Upload a folder. Until this returns, the bundle does not exist; a failed one leaves only files to prune.

        Another try uploads only the files that have not arrived. Raises OSError if the folder cannot be read.
        """
        paths = {path.relative_to(source).as_posix(): path for path in sorted(source.rglob("*")) if path.is_file()}
        if not paths:
            raise FileNotFoundError(f"{source} has no files")
        files = {name: (path.stat().st_size, digest_of_file(path)) for name, path in paths.items()}
        place = f"{number}-{_digest_of([files, dict(about)])[:8]}"
        held = self.folder.child(place).tree()
        missing = [name for name, (size, _) in files.items() if held.get(name) != size]
        self.folder.upload({f"{place}/{name}": paths[name] for name in missing})
        body = asdict(BundleManifest(place, files, about))
        self.folder.write(f"{number}.json", json.dumps({**body, "digest": _digest_of(body)}, indent=1).encode())

    def get(self, number: int, target: Path) -> None:
        """Download a bundle into a new folder, which appears when all of it is there and has the right digests.

        Raises:
            BucketError: It is damaged (`bucket.damaged`), or cannot be read.
            OSError: The disk refuses it, or there is such a folder.
        """
        manifest = self.manifest(number)
        with staged_folder(target) as stage:
            try:
                self.folder.download({f"{manifest.folder}/{name}": stage / name for name in manifest.files})
            except BucketError as error:
                if error.code != "bucket.missing":
                    raise
                raise self._damaged(number, f"a file in {manifest.folder} is missing") from None
            for name, (_, check) in manifest.files.items():
                if digest_of_file(stage / name) != check:
                    raise self._damaged(number, f"{manifest.folder}/{name} has another digest than its manifest says")

    def prune(self, keep: int, besides: Collection[int] = ()) -> None:
        """Delete all but the newest `keep` bundles and those in `besides`, and the remains of broken uploads."""
        numbers = self.numbers()
        if not numbers:
            return
        kept = [number for number in numbers if number in numbers[-keep:] or number in besides]
        for number in set(numbers) - set(kept):
            self.folder.delete(f"{number}.json")  # first, so that no manifest names files that are gone
        used = {self.manifest(number).folder for number in kept}
        for name in self.folder.names():
            number_text, dash, _ = name.partition("-")
            # Another process may be uploading the newest number, or one above it.
            if dash and name not in used and number_text.isdecimal() and int(number_text) < kept[-1]:
                self.folder.delete(name)

    def fetch_newer(self, folder: Path, newest: int) -> None:
        """Download the newest sound bundle into a folder, as a folder named by its number.

        Args:
            newest: The newest number that the disk has; -1 if it has none. Only a greater one is downloaded.

        Raises:
            BucketError: The bucket cannot be read.
            OSError: The disk refuses it.
        """
        for number in reversed([number for number in self.numbers() if number > newest]):
            try:
                with progress(f"downloading checkpoint {number} from {self.folder}"):
                    self.get(number, folder / str(number))
            except BucketError as error:
                if error.code != "bucket.damaged":
                    raise
                log.warning("%s", error, extra={"code": error.code})
                continue
            except OSError:
                if not (folder / str(number)).is_dir():  # else another process has just downloaded it to this folder
                    raise
            log.info("checkpoint %s was downloaded from %s", number, self.folder)
            return

    def _damaged(self, number: int, why: str) -> BucketError:
        return BucketError(
            f"bundle {number} in {self.folder} is damaged ({why})", "An earlier one is used.", code="bucket.damaged"
        )


def _digest_of(body: Any) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())


def digest_of_file(path: Path) -> str:
    """Return the XXH3-128 digest of a file, which detects damage."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
