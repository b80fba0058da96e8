"""Folders of files in a bucket, each complete or absent.

A bundle has a number. Its files are uploaded first, into a folder with a random name. Then comes one small file, its
manifest `NUMBER.json`, which has the size and digest of each. A bundle without its manifest does not exist, so an
upload that was cut off is never read. Two processes that write the same number cannot mix their files.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.files import staged_folder
from archipelago.broker.observe.progress import progress
from archipelago.broker.wire import digest

FORMAT = 1
_MANIFEST_BYTES_MAX = 64 << 20
_CHUNK_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleManifest:
    """The content of a manifest.

    Attributes:
        folder: The folder of the files.
        files: The size and digest of each file, by its path in that folder.
        about: What the bundle holds, such as the name of its run.
    """

    folder: str
    files: Mapping[str, tuple[int, str]]
    about: Mapping[str, str]

    def to_json(self) -> bytes:
        """Return the manifest with a digest of itself."""
        body = {"format": FORMAT, "folder": self.folder, "files": self.files, "about": self.about}
        return json.dumps({**body, "digest": _digest_of(body)}, sort_keys=True, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> BundleManifest:
        """Parse a manifest. Raises ValueError, LookupError, TypeError, AttributeError or RecursionError."""
        body = json.loads(data)
        if body["format"] != FORMAT or body.pop("digest") != _digest_of(body):
            raise ValueError("it is damaged")
        files = {str(path): (int(size), str(check)) for path, (size, check) in body["files"].items()}
        places = [PurePosixPath(path) for path in [*files, body["folder"]]]
        if any(place.is_absolute() or ".." in place.parts or "\\" in str(place) for place in places):
            raise ValueError("it names a file outside of its folder")
        return cls(str(body["folder"]), files, {str(k): str(v) for k, v in body["about"].items()})


def _digest_of(body: Mapping[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())


class Bundles:
    """The bundles in a folder of a bucket. Its methods raise BucketError."""

    def __init__(self, folder: BucketFolder) -> None:
        self.folder = folder
        #: The upload that failed last, by its number: its folder, and the size and digest of each file that arrived.
        self._begun: dict[int, tuple[str, dict[str, tuple[int, str]]]] = {}

    def numbers(self) -> list[int]:
        """Return the numbers of complete bundles, ascending."""
        stems = [name.removesuffix(".json") for name in self.folder.files() if name.endswith(".json")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def manifest(self, number: int) -> BundleManifest:
        """Read a manifest. Raises BucketError (`bucket.damaged`)."""
        data = self.folder.read(f"{number}.json", _MANIFEST_BYTES_MAX)
        try:
            return BundleManifest.from_json(data)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(number, f"{number}.json cannot be read: {error}") from None

    def put(self, number: int, source: Path, about: Mapping[str, str]) -> None:
        """Upload a folder. Until this returns, the bundle does not exist; a failed one leaves only files to prune.

        Another try of the last number that failed uploads only the files that have not arrived.
        """
        files = {str(path.relative_to(source).as_posix()): path for path in sorted(source.rglob("*")) if path.is_file()}
        place, arrived = self._begun.get(number, (f"{number}-{secrets.token_hex(4)}", {}))
        self._begun = {number: (place, arrived)}
        described = {}
        for name, path in files.items():
            described[name] = path.stat().st_size, digest_of_file(path)
            if arrived.get(name) != described[name]:
                self.folder.upload(path, f"{place}/{name}")
                arrived[name] = described[name]
        self.folder.write(f"{number}.json", BundleManifest(place, described, about).to_json())
        self._begun = {}

    def get(self, number: int, target: Path) -> None:
        """Download a bundle into a new folder, which appears when all of it is there and has the right digests.

        Raises:
            BucketError: It is damaged (`bucket.damaged`), or cannot be read.
            OSError: The disk refuses it, or there is such a folder.
        """
        manifest = self.manifest(number)
        with staged_folder(target) as stage:
            for name, (size, check) in manifest.files.items():
                try:
                    self.folder.download(f"{manifest.folder}/{name}", stage / name)
                except BucketError as error:
                    if error.code != "bucket.missing":
                        raise
                    raise self._damaged(number, f"{manifest.folder}/{name} is missing") from None
                if (stage / name).stat().st_size != size or digest_of_file(stage / name) != check:
                    raise self._damaged(number, f"{manifest.folder}/{name} has another digest than its manifest says")

    def has(self, number: int, source: Path) -> bool:
        """Return whether the bundle of that number holds exactly the files of this folder."""
        with suppress(BucketError):
            files = {str(path.relative_to(source).as_posix()): path for path in source.rglob("*") if path.is_file()}
            held = self.manifest(number).files
            return held.keys() == files.keys() and all(digest_of_file(files[name]) == held[name][1] for name in held)
        return False

    def prune(self, keep: int, besides: Collection[int] = ()) -> None:
        """Delete all but the newest `keep` bundles and those in `besides`, and the remains of broken uploads."""
        numbers = self.numbers()
        if not numbers:
            return
        kept = [number for number in numbers if number in numbers[-keep:] or number in besides]
        for number in set(numbers) - set(kept):
            self.folder.delete(f"{number}.json")  # first, so that no manifest names files that are gone
        used = {self.manifest(number).folder for number in kept}
        for name in self.folder.folders():
            number_text = name.partition("-")[0]
            # Another process may be uploading the newest number, or one above it.
            if name not in used and number_text.isdecimal() and int(number_text) < kept[-1]:
                self.folder.delete(name)

    def _damaged(self, number: int, why: str) -> BucketError:
        return BucketError(
            f"bundle {number} in {self.folder} is damaged ({why})", "An earlier one is used.", code="bucket.damaged"
        )


def fetch_newer(bundles: Bundles, folder: Path, newest: int, most: int = 1) -> None:
    """Download the newest bundles with numbers above `newest` into a folder, as folders named by their numbers.

    Damaged ones are skipped.

    Args:
        bundles: Where they are.
        folder: The folder on disk.
        newest: The newest number that the disk has; -1 if it has none.
        most: How many are downloaded.

    Raises:
        BucketError: The bucket cannot be read.
        OSError: The disk refuses them.
    """
    for number in reversed([number for number in bundles.numbers() if number > newest]):
        try:
            with progress(f"downloading checkpoint {number} from {bundles.folder}"):
                bundles.get(number, folder / str(number))
        except BucketError as error:
            if error.code != "bucket.damaged":
                raise
            log.warning("%s", error, extra={"code": error.code})
            continue
        except OSError:
            if not (folder / str(number)).is_dir():  # else another process has just downloaded it to this folder
                raise
        log.info("checkpoint %s was downloaded from %s", number, bundles.folder)
        most -= 1
        if not most:
            return


def digest_of_file(path: Path) -> str:
    """Return the XXH3-128 digest of a file, which detects damage (`wire.digest`)."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()
