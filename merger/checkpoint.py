"""Whole runs on disk: `CheckpointStore` keeps images of a run, so that a Redis may lose everything.

A checkpoint is a step of an Orbax `CheckpointManager`, which writes it atomically and keeps the newest few. Anyone can
restore it with Orbax alone. Its items are:

* `parameters`: the merger's exact parameters, float32, by tensor name in the tensors' shapes.
* `published`: what the islands hold, in the same form. It differs from `parameters` by the rounding of snapshots.
* `outer`: the outer optimiser's state, by fragment and leaf. It is absent before the first round and for rules without
  a state.
* `pending`: the payloads of contributions that were not merged yet, uint8, by position. It is absent without any.
* `metadata`: everything else as JSON, with a digest of itself and of the arrays.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.commits import Image
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.files import FILE_FAULTS, in_words, remedy
from archipelago.broker.full_state import PARAMETERS, FullState, octets
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Counters, Evaluation, Snapshot, TapeEntry, from_fields, to_fields
from archipelago.broker.wire import digest

FORMAT = 2
_UNREADABLE = (OSError, ValueError, LookupError, TypeError)
#: The field of the counters. Those of earlier versions have another name.
COUNTERS = "counters"
log = logging.getLogger(__name__)
Array = NDArray[Any]
#: Arrays by item, and within an item by name, such as `{"parameters": {"embed": …}}`.
Items = dict[str, dict[str, Any]]
Fields = dict[str, Any]


class CheckpointStore:
    """Checkpoints of one run in a folder. One process saves, and any may read. `fetch` adds newer ones to it."""

    def __init__(self, folder: Path, keep: int = 3, fetch: Callable[[], None] = lambda: None) -> None:
        if keep < 1:
            raise ConfigError(f"cannot keep {keep} checkpoints", "Keep at least one.", code="config.value")
        self.folder = folder.absolute()  # as Orbax requires
        self.keep = keep
        self.fetch = fetch
        #: Returns checkpoints that must stay because they are being copied.
        self.held: Callable[[], Collection[int]] = tuple
        #: The stores of all shards of the run, this one among them.
        self.parts: Sequence[CheckpointStore] = (self,)
        #: The last rounds of checkpoints, by number, as far as they were read.
        self._last_rounds: dict[int, int] = {}

    def numbers(self) -> list[int]:
        """Return the numbers of finished checkpoints, ascending. Does not load Orbax.

        Raises:
            ConfigError: The folder cannot be listed (`checkpoint.unreadable`).
        """
        try:
            # Orbax renames a checkpoint to its number when all of it is written.
            return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ConfigError(
                f"the checkpoints in {self.folder} cannot be listed ({error})",
                "May this user read the folder?",
                code="checkpoint.unreadable",
            ) from None

    def complete(self) -> list[int]:
        """Return the numbers of checkpoints of which the parts of all shards are here, ascending."""
        return sorted(set.intersection(*(set(part.numbers()) for part in self.parts)))

    def path_of(self, number: int) -> Path:
        """Return the folder of a finished checkpoint."""
        return self.folder / str(number)

    def about(self) -> dict[str, str]:
        """Return the `run` and the `uid` of the newest checkpoint; nothing if there is none that can be read.

        Only the metadata is read, without Orbax, whose import would delay each start of a merger by a second.
        """
        for number in reversed(self.numbers()):
            with suppress(*_UNREADABLE):
                manifest = self._fields(number)["manifest"]
                return {name: str(manifest[name]) for name in ("run", "uid")}
        return {}

    def after(self, closed: int) -> dict[int, int]:
        """Return the rounds of the checkpoints that are of later rounds than that one, by number.

        There are some where a Redis came back older. Only metadata is read.
        """
        return {number: last for number, last in self._rounds().items() if last > closed}

    def later(self) -> list[int]:
        """Return the checkpoints that are of later rounds than the newest one (see `after`)."""
        rounds = self._rounds()
        return [number for number, last in rounds.items() if last > rounds[max(rounds)]]

    def _rounds(self) -> dict[int, int]:
        numbers = self.numbers()
        for number in set(numbers) - self._last_rounds.keys():  # half a megabyte each, which never changes
            with suppress(*_UNREADABLE):
                self._last_rounds[number] = max(int(each["round"]) for each in self._fields(number)["snapshots"])
        return {number: self._last_rounds[number] for number in numbers if number in self._last_rounds}

    def _fields(self, number: int) -> Fields:
        text = (self.path_of(number) / "metadata" / "metadata").read_text(encoding="utf-8")
        return dict(json.loads(text)["fields"])

    def next_number(self) -> int:
        """Return a number that is at least 1 and greater than that of any finished checkpoint, or part of one."""
        return max((number for part in self.parts for number in part.numbers()), default=0) + 1

    def save(self, image: Image) -> None:
        """Write a checkpoint, whole or not at all, and delete those beyond the newest `keep`.

        In a run with several shards, the newest one that is complete stays, too, and so do checkpoints that are `held`,
        and those of later rounds than this one.
        Raises ConfigError if a newer one exists, or if it cannot be written (`checkpoint.write`).
        """
        newest = max(self.numbers(), default=0)
        if image.number <= newest:
            raise ConfigError(
                f"checkpoint {image.number} is too late: {self.folder} already holds {newest}",
                "Does another merger serve this run? Then this one may stop.",
                code="checkpoint.write",
            )
        failpoint("checkpoint.before")
        try:
            items = _arrays_of(image)
            besides = {*self.complete()[-1:], *self.held(), *self.after(image.round)}
            _save(self.folder, self.keep, besides, image.number, items, _metadata_of(image, items))
        except FILE_FAULTS as error:
            raise ConfigError(
                f"checkpoint {image.number} cannot be written to {self.folder} ({in_words(error)})",
                f"{remedy(error)} Earlier checkpoints are unchanged.",
                code="checkpoint.write",
            ) from error
        failpoint("checkpoint.done")

    def load(self, number: int | None = None) -> Image | None:
        """Return the image of a checkpoint, by default of the newest that is whole; None when there is none.

        Raises:
            ConfigError: That number is not here (`checkpoint.missing`), or none can be read (`checkpoint.unreadable`).
        """
        here = self.numbers()
        if number is not None and number not in here:
            raise ConfigError(
                f"{self.folder} has no checkpoint {number}",
                f"It holds {', '.join(map(str, here)) or 'no checkpoints'}.",
                code="checkpoint.missing",
            )
        faults: dict[int, str] = {}
        while tried := [n for n in self.numbers() if n not in faults and number in (None, n)]:
            newest = tried[-1]
            try:
                return self._read(newest)
            except FILE_FAULTS as error:
                # The folder is listed again: a checkpoint that vanished was deleted because there are newer ones.
                faults[newest] = in_words(error)
                log.warning("skipping checkpoint %d in %s: %s", newest, self.folder, faults[newest])
        if not faults:
            return None
        raise ConfigError(
            f"no checkpoint in {self.folder} can be read ({'; '.join(f'{n}: {fault}' for n, fault in faults.items())})",
            "Put back a copy of the folder, name another one, or go on with the version of archipelago that wrote it; "
            "`archipelago init` begins a new run.",
            code="checkpoint.unreadable",
        )

    def _read(self, number: int) -> Image:
        items, metadata = _restore(self.folder, number)
        if metadata.get("format") != FORMAT:
            raise WireError(f"it has format {metadata.get('format')!r:.32}, and this version reads format {FORMAT}")
        fields = metadata["fields"]
        if metadata["digest"] != _digest_of(items, fields) or fields["number"] != number:
            raise WireError("it is damaged: its digest differs")
        if COUNTERS not in fields:
            from archipelago.merger.earlier import taken_over  # which loads JAX

            fields = taken_over(fields)
        return _image_of(items, fields)


def describe(images: Sequence[Image]) -> str:
    """Return a line about a checkpoint for people, from the images of all shards."""
    last, step = max(image.round for image in images), max(image.step for image in images)
    of, pending = images[0], sum(len(image.pending) for image in images)
    return f"checkpoint {of.number} of run {of.manifest.run!r}: round {last}, step {step}, {pending} pending"


# -- an image as arrays and metadata ---------------------------------------------------------------------------------


def _arrays_of(image: Image) -> Items:
    manifest = image.manifest
    items: Items = {"parameters": {}, "published": {}, "outer": {}, "pending": {}}
    for full in image.fragments:
        p, state = full.snapshot.fragment, dict(full.own)
        items["published"] |= _tensors(manifest, p, full.published_N)
        items["parameters"] |= _tensors(manifest, p, state.pop(PARAMETERS, full.published_N))
        if state:
            items["outer"][str(p)] = state
    items["pending"] = {str(n): np.frombuffer(data, np.uint8) for n, (_, data) in enumerate(image.pending) if data}
    return {name: arrays for name, arrays in items.items() if arrays}


def _tensors(manifest: Manifest, p: int, vector_N: Array) -> dict[str, Array]:
    """Return the tensors of a fragment's vector by name. Orbax cannot hold empty ones."""
    return {name: tensor for name, tensor in manifest.split(p, vector_N).items() if tensor.size}


def _vector(manifest: Manifest, p: int, tensors: Mapping[str, Array]) -> NDArray[np.float32]:
    """Return the vector of a fragment from its tensors. Raises WireError if one does not fit."""
    out_N = np.zeros(manifest.sizes[p], np.float32)
    for tensor, offset in manifest.layout[p]:
        if tensor.size:
            array = tensors[tensor.name]
            if array.dtype != np.float32 or array.shape != tensor.shape:
                raise WireError(f"{tensor.name} is {array.dtype} {array.shape}, not float32 {tensor.shape}")
            out_N[offset : offset + tensor.size] = array.reshape(-1)
    return out_N


def _metadata_of(image: Image, items: Items) -> Fields:
    fields = {
        "number": image.number,
        "manifest": image.manifest.to_fields(),
        "shard": image.manifest.shard or 0,
        "snapshots": [to_fields(full.snapshot) for full in image.fragments],
        "has_outer": [bool(full.own) for full in image.fragments],
        "state": image.state,
        COUNTERS: to_fields(image.counters),
        "cursors": {name: list(cursor) for name, cursor in image.cursors.items()},
        "tape": [to_fields(entry) for entry in image.tape],
        "evaluations": [to_fields(evaluation) for evaluation in image.evaluations],
        "pending": [to_fields(contribution) for contribution, _ in image.pending],
    }
    arrays = [list(path) for path, _ in _leaves(items)]
    return {"format": FORMAT, "fields": fields, "arrays": arrays, "digest": _digest_of(items, fields)}


def _image_of(items: Items, fields: Fields) -> Image:
    manifest, fragments = Manifest.from_fields(fields["manifest"]).of_shard(fields.get("shard", 0)), []
    for values, has_outer in zip(fields["snapshots"], fields["has_outer"], strict=True):
        snapshot = from_fields(Snapshot, values)
        p = snapshot.fragment
        published_N, own = _vector(manifest, p, items.get("published", {})), {}
        if has_outer:
            params_N = _vector(manifest, p, items.get("parameters", {}))
            own = {PARAMETERS: params_N, **items.get("outer", {}).get(str(p), {})}
        fragments.append(FullState(snapshot, published_N, own))
    payloads = items.get("pending", {})
    return Image(
        manifest=manifest,
        number=fields["number"],
        fragments=tuple(fragments),
        state=fields["state"],
        counters=from_fields(Counters, fields[COUNTERS]),
        cursors={name: (of_pass, sequence) for name, (of_pass, sequence) in fields["cursors"].items()},
        tape=tuple(from_fields(TapeEntry, values) for values in fields["tape"]),
        evaluations=tuple(from_fields(Evaluation, values) for values in fields["evaluations"]),
        pending=tuple(
            (from_fields(Contribution, values), payloads[str(n)].tobytes() if str(n) in payloads else b"")
            for n, values in enumerate(fields["pending"])
        ),
    )


def _digest_of(items: Items, fields: Fields) -> str:
    """Return a digest of the metadata's fields and of every array, because Orbax does not notice all damage."""
    leaves = sorted(_leaves(items), key=lambda leaf: leaf[0])
    arrays = [[path, str(array.dtype), array.shape, digest(octets(array))] for path, array in leaves]
    return digest(json.dumps([fields, arrays], sort_keys=True).encode())


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Array]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


# -- arrays and metadata on disk -------------------------------------------------------------------------------------


@contextmanager
def _manager(folder: Path, **options: Any) -> Iterator[Any]:
    import orbax.checkpoint as ocp  # takes most of a second

    chatter = logging.getLogger("absl")
    level = chatter.level
    chatter.setLevel(logging.CRITICAL)  # Orbax also raises what it logs, and the log would get pages of it
    try:
        how = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options)
        with _without_leak(), ocp.CheckpointManager(folder, options=how) as manager:
            yield manager
    finally:
        chatter.setLevel(level)


class _PlainSpec(Fields):
    """What Orbax gives to `tensorstore.KvStore.Spec`, in its place."""

    to_json = Fields.copy


@contextmanager
def _without_leak() -> Iterator[None]:
    """Keep Orbax from a call of tensorstore that loses half a kilobyte for each array: gigabytes in a month.

    Orbax 0.12 calls `tensorstore.KvStore.Spec(plain).to_json()` to see plain values with their defaults, and
    tensorstore 0.1.76 to 0.1.86 never frees the result. Meanwhile Orbax gets its own values back.
    """
    import tensorstore

    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils as private
    except ImportError:  # another version of Orbax, with other faults
        yield
        return
    open_only = SimpleNamespace(open=tensorstore.KvStore.open, Spec=_PlainSpec)
    private.ts = SimpleNamespace(**{**vars(tensorstore), "KvStore": open_only})
    try:
        yield
    finally:
        private.ts = tensorstore


def _save(folder: Path, keep: int, besides: Collection[int], number: int, items: Items, metadata: Fields) -> None:
    import orbax.checkpoint as ocp

    policies = ocp.checkpoint_managers
    kept = policies.AnyPreservationPolicy([policies.LatestN(keep), policies.CustomSteps(list(besides))])
    trees = {name: ocp.args.StandardSave(arrays) for name, arrays in items.items()}
    with _manager(folder, create=True, preservation_policy=kept, cleanup_tmp_directories=True) as manager:
        manager.save(number, args=ocp.args.Composite(metadata=ocp.args.JsonSave(metadata), **trees), force=True)


def _restore(folder: Path, number: int) -> tuple[Items, Fields]:
    import orbax.checkpoint as ocp

    with _manager(folder, create=False, read_only=True) as manager:
        wanted = ocp.args.Composite(metadata=ocp.args.JsonRestore())
        metadata: Fields = manager.restore(number, args=wanted)["metadata"]
        items: Items = {}
        for path in metadata["arrays"]:
            # One at a time: when one of several is damaged, Orbax abandons the reads of the others with pages of log.
            how: Any = ocp.RestoreArgs(restore_type=np.ndarray)
            args = ocp.args.PyTreeRestore(
                item=_nested(path[1:], 0), restore_args=_nested(path[1:], how), partial_restore=True
            )
            found = manager.restore(number, args=ocp.args.Composite(**{path[0]: args}))[path[0]]
            place: dict[str, Any] = items
            for name in path[:-1]:
                place = place.setdefault(name, {})
            for name in path[1:]:
                found = found[name]
            place[path[-1]] = np.asarray(found)
    return items, metadata


def _nested(path: Sequence[str], value: Any) -> Any:
    """Return dictionaries in dictionaries that hold a value at that path."""
    for name in reversed(path):
        value = {name: value}
    return value
