"""The manifest: the config, corpus, tensors and fragments that all workers of a run share.

Workers take shapes and dtypes from the manifest and never from a payload, so a payload cannot make them allocate
memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge
from pydantic import StringConstraints

from archipelago.broker import config as configs
from archipelago.broker.codecs import codec
from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError, MismatchError, fault_in
from archipelago.broker.frozen import FrozenTensor
from archipelago.broker.messages import Name, adapter

TensorKind = Literal["embedding", "rest"]
#: The format of what a run keeps in its broker. Checkpoints of earlier formats can be restored.
FORMAT = "0.4"
#: The packages whose versions a manifest records.
PACKAGES = ("archipelago-train", "jax", "jaxlib", "flax", "optax", "numpy", "redis")
MISSING = "not installed"
#: The most characters of a model's own settings, which all workers read.
MODEL_CONFIG_MAX = 1 << 16
#: The code of the error that another version of archipelago has made a run.
OTHER_FORMAT = "config.format"
#: Smaller payloads always use the run's codec, because most of their time is the round trip.
SMALL_BYTES = 64 << 10
#: More shards than this share one host badly, and each takes connections of every island.
SHARDS_MAX = 64


def installed_versions() -> dict[str, str]:
    """Return this machine's versions of the packages that a manifest records."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = MISSING
    return found


class Tensor(NamedTuple):
    """One float32 tensor. Its kind selects the merge rule."""

    name: str
    shape: tuple[Annotated[int, Ge(1)], ...]
    kind: TensorKind = "rest"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def balanced(tensors: Sequence[Tensor], count: int) -> tuple[tuple[str, ...], ...]:
    """Split the tensors into at most `count` fragments of similar size, as the paper does.

    Each tensor, largest first, goes into the smallest fragment so far. The largest fragment is then at most 4/3 of the
    optimal one (Graham 1969). Names and indices break ties, so that every machine computes the same fragments.

    Returns:
        The names of the tensors of each fragment. No fragment is empty.
    """
    bins: list[list[str]] = [[] for _ in range(min(count, len(tensors)))]
    loads = [0] * len(bins)
    for tensor in sorted(tensors, key=lambda t: (-t.size, t.name)):
        lightest = loads.index(min(loads))
        bins[lightest].append(tensor.name)
        loads[lightest] += tensor.size
    return tuple(tuple(sorted(names)) for names in bins)


class Corpus(NamedTuple):
    """The corpus that a run trains on. A worker looks it up on its machine by name, and compares the other values.

    Attributes:
        tokenizer: The digest of the tokenizer; empty if tokens are bytes.
        tokens: The number of tokens that the tokenizer made; 0 if tokens are bytes.
    """

    name: str
    digest: str
    bytes: int
    tokenizer: str = ""
    tokens: int = 0


#: The corpus of a run that knows nothing of its islands' data.
NO_CORPUS = Corpus("", "", 0)


# -- shards -----------------------------------------------------------------------------------------------------------
# Fragments and rounds have the same numbers in all shards. A shard closes the rounds of its own fragments, in order.
# Those of different shards close in any order.


def dealt(sizes: Sequence[int], shards: int) -> tuple[tuple[int, ...], ...]:
    """Deal fragments out to shards of similar size: each fragment, largest first, goes to the lightest shard.

    Args:
        sizes: The elements of each fragment.
        shards: The number of shards, at most that of the fragments.

    Returns:
        The fragments of each shard, in ascending order. No shard is empty.
    """
    hands: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for fragment in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        lightest = min(range(shards), key=lambda k: (loads[k], len(hands[k]), k))
        hands[lightest].append(fragment)
        loads[lightest] += sizes[fragment]
    return tuple(tuple(sorted(hand)) for hand in hands)


@dataclass(frozen=True)
class OwnRounds:
    """The rounds of a run, or of one of its shards, in order. Arguments may be those of other shards. `count` is P."""

    fragments: Sequence[int]
    count: int

    def until(self, number: int) -> int:
        """Return how many of these rounds there are up to that one."""
        cycles, fragment = divmod(number, self.count)
        return cycles * len(self.fragments) + bisect_left(self.fragments, fragment)

    def between(self, after: int, until: int) -> int:
        """Return how many of these rounds there are after the first one, up to the second one."""
        return self.until(until) - self.until(after)

    def following(self, closed: int, count: int) -> list[int]:
        """Return the `count` of these rounds after that one."""
        first, mine = self.until(closed), self.fragments
        places = (divmod(place, len(mine)) for place in range(first, first + count))
        return [cycles * self.count + mine[own] + 1 for cycles, own in places]

    def next(self, closed: int) -> int:
        """Return the first of these rounds after that one."""
        return self.following(closed, 1)[0]


@dataclass(frozen=True)
class Layout:
    """The fragments of each shard, in ascending order. Together they are 0 … P − 1."""

    fragments: tuple[tuple[int, ...], ...]

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.fragments)

    @cached_property
    def count(self) -> int:
        return sum(map(len, self.fragments))

    def count_without(self, shards: Collection[int]) -> int:
        """Return the number of fragments of the other shards."""
        return sum(len(mine) for shard, mine in enumerate(self.fragments) if shard not in shards)

    @cached_property
    def _shards(self) -> dict[int, int]:
        return {p: shard for shard, mine in enumerate(self.fragments) for p in mine}

    def shard_of(self, number: int) -> int:
        """Return the shard that closes a round."""
        return self._shards[(number - 1) % self.count]

    @cached_property
    def rounds(self) -> tuple[OwnRounds, ...]:
        return tuple(OwnRounds(mine, self.count) for mine in self.fragments)


@dataclass(frozen=True)
class Manifest:
    """A run's identity. Workers with equal manifests can merge each other's contributions and snapshots.

    Attributes:
        tensors: All parameter tensors of the model that are trained.
        fragments: The names of the tensors of each fragment.
        versions: The versions of the packages that created the run, for debugging.
        uid: Distinguishes the run from others that had its name, 32 hexadecimal digits. A run that continues from a
            checkpoint keeps it. Runs that are never replaced, such as those in virtual time, have none.
        frozen: The tensors of the model that are not trained, by digest. They are in no fragment, and never sent.
        task: The name of the users' task that the islands train; empty for our models, and for users' scripts.
        shards: S, the number of shards that the fragments are dealt out to.
        model_config: The settings of a model of `transformers` as JSON, for exports; empty for other models.
        shard: The number of the shard, in the manifest of one of several (`of_shard`); None in the run's own.
    """

    run: Name
    config: RunConfig
    tensors: tuple[Tensor, ...]
    fragments: tuple[tuple[str, ...], ...]
    corpus: Corpus
    versions: Mapping[str, str]
    uid: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")] = ""
    frozen: tuple[FrozenTensor, ...] = ()
    task: str = ""
    shards: int = 1
    model_config: Annotated[str, StringConstraints(max_length=MODEL_CONFIG_MAX)] = ""
    shard: int | None = None

    @cached_property
    def shard_layout(self) -> Layout:
        """The fragments of each shard. They are dealt out by size."""
        return Layout(dealt(self.sizes, self.shards))

    @property
    def has_scripts(self) -> bool:
        """Whether the islands are training scripts of their users, whose model only they can evaluate."""
        return self.config.has_user_loops and not self.task

    def of_shard(self, shard: int | None) -> Manifest:
        """Return the manifest of one of several shards, or of the whole run: the same, with other fragments its own."""
        return self if self.shards == 1 else replace(self, shard=shard)

    @cached_property
    def own_fragments(self) -> Sequence[int]:
        """The fragments of this run or shard, in ascending order."""
        return range(len(self.fragments)) if self.shard is None else self.shard_layout.fragments[self.shard]

    @cached_property
    def own_rounds(self) -> OwnRounds:
        """The rounds of this run or shard."""
        return OwnRounds(self.own_fragments, len(self.fragments))

    def window_after(self, closed: int) -> list[int]:
        """Return the rounds of this run or shard that can be open after that one. No two of them share a fragment."""
        return self.own_rounds.following(closed, min(self.config.sync.window, len(self.own_fragments)))

    @cached_property
    def stride(self) -> float:
        """The inner steps from one round of this run or shard to the next, H / P."""
        return self.config.sync.interval / len(self.own_fragments)

    def described(self, number: int) -> str:
        """Return a round of this run or shard in words."""
        return f"round {number}" + ("" if self.shard is None else f" of shard {self.shard}")

    @cached_property
    def layout(self) -> tuple[tuple[tuple[Tensor, int], ...], ...]:
        """The tensors of each fragment, each with the offset of its first element in the fragment's flat vector."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        out = []
        for names in self.fragments:
            offset, rows = 0, []
            for name in names:
                rows.append((by_name[name], offset))
                offset += by_name[name].size
            out.append(tuple(rows))
        return tuple(out)

    def split(self, p: int, vector_N: Any) -> dict[str, Any]:
        """Return the tensors of fragment `p` by name, as views of its flat vector."""
        return {t.name: vector_N[offset : offset + t.size].reshape(t.shape) for t, offset in self.layout[p]}

    def named(self, vectors: Sequence[Any]) -> dict[str, Any]:
        """Return all tensors by name, in alphabetical order, as views of one flat vector for each fragment."""
        found = [each for p, vector_N in enumerate(vectors) for each in self.split(p, vector_N).items()]
        return dict(sorted(found))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each fragment."""
        return tuple(sum(tensor.size for tensor, _ in rows) for rows in self.layout)

    def codecs(self, p: int) -> tuple[str, ...]:
        """Return the codecs that islands may send a fragment by: the run's, and for a large one that of thin links."""
        up, thin = self.config.wire.up, self.config.thin
        is_large = codec(up).encoded_size(self.sizes[p]) >= SMALL_BYTES
        return (up, thin) if thin and is_large else (up,)

    @property
    def parameters(self) -> int:
        """The number of parameters that this run or shard trains."""
        return sum(self.sizes[p] for p in self.own_fragments)

    @property
    def frozen_parameters(self) -> int:
        """The number of parameters of the model that the run does not train."""
        return sum(math.prod(tensor.shape) for tensor in self.frozen)

    def require_own_code(self, what: str) -> None:
        """Raise ConfigError (`model.own`) if the run's model is that of its users' training scripts.

        `what` is not possible for such a run; a sentence begins with it.
        """
        if self.task:
            raise ConfigError(
                f"{what} is not possible for the run {self.run!r}: it trains the task {self.task!r} of its users",
                "`up` and `island` take the file of the task (--task FILE.py:NAME).",
                code="model.own",
            )
        if self.config.has_user_loops:
            raise ConfigError(
                f"{what} is not possible for the run {self.run!r}: its islands are training scripts of its users, and "
                "it knows the tensors of their model, but not how to compute it",
                "Those scripts train it with `archipelago.join` (docs/guide/your-training.md).",
                code="model.own",
            )

    def fragment_of(self, round_number: int) -> int:
        """Return the fragment that a round syncs: p = (t − 1) mod P."""
        return (round_number - 1) % len(self.fragments)

    def version_after(self, round_number: int) -> int:
        """Return the version of the round's fragment after that round. Rounds of a fragment close in order."""
        return (round_number - 1) // len(self.fragments) + 1

    def version_at(self, closed: int, fragment: int) -> int:
        """Return the version of a fragment once round `closed` has closed: how many of its rounds have."""
        return (closed - fragment - 1) // len(self.fragments) + 1

    def round_of(self, version: int, fragment: int) -> int:
        """Return the round that published this version of a fragment; 0 for version 0."""
        return fragment + 1 + (version - 1) * len(self.fragments) if version else 0

    @cached_property
    def tree_digest(self) -> str:
        """Sixteen hexadecimal digits that identify the tensors, their split into fragments, and frozen tensors."""
        text = json.dumps([self.tensors, self.fragments, *([self.frozen] if self.frozen else [])])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_fields(self) -> dict[str, str]:
        """Return the manifest of the run, also of one of its shards, as text fields for a Redis hash."""
        return {
            "run": self.run,
            "config": self.config.to_json(),
            "config_digest": self.config.digest(),
            "tensors": json.dumps(self.tensors),
            "fragments": json.dumps(self.fragments),
            "tree_digest": self.tree_digest,
            "corpus": json.dumps(self.corpus),
            "versions": json.dumps(dict(self.versions), sort_keys=True),
            "uid": self.uid,
            "frozen": json.dumps(self.frozen),
            "task": self.task,
            "shards": str(self.shards),
            "model_config": self.model_config,
            "format": FORMAT,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Manifest:
        """Return the manifest that `to_fields` wrote. One of an earlier version, in a checkpoint, may have no shards.

        Raises:
            ConfigError: It is damaged (`config.manifest`), or of shards that an earlier version made (`config.format`).
        """
        try:
            manifest: Manifest = adapter(Manifest).validate_python(
                {name: json.loads(fields[name]) for name in ("tensors", "fragments", "corpus", "versions", "frozen")}
                | {name: fields[name] for name in ("run", "uid", "task")}
                | {"config": configs.from_json(fields["config"]), "shards": fields.get("shards", "1")}
                | {"model_config": fields.get("model_config", "")}
            )
            manifest._require_whole(fields)
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"the run's manifest cannot be read ({fault_in(error)})",
                "If another version of archipelago made the run, use that one. If this is damaged, stop its "
                "mergers, delete it (`archipelago rm NAME URL --force`), and go on from its checkpoint: "
                "`archipelago merger --resume`.",
                code="config.manifest",
            ) from None
        if manifest.shards > 1 and fields.get("format") != FORMAT:
            raise ConfigError(
                f"the run {manifest.run!r} has {manifest.shards} shards, and an earlier version of archipelago made it",
                "Finish it with that version, or export its weights there (`archipelago export`), and begin a new run "
                "from them (`archipelago init --from`).",
                code=OTHER_FORMAT,
            )
        return manifest

    def _require_whole(self, fields: Mapping[str, str]) -> None:
        """Raise ValueError unless the fragments partition the tensors and both digests equal the stored ones."""
        names = sorted(name for fragment in self.fragments for name in fragment)
        if not names or names != sorted(tensor.name for tensor in self.tensors) or not all(self.fragments):
            raise ValueError("fragments: not a partition of the tensors")
        if {tensor.name for tensor in self.frozen} & {tensor.name for tensor in self.tensors}:
            raise ValueError("frozen: a tensor that is trained")
        if not 1 <= self.shards <= min(SHARDS_MAX, len(self.fragments)):
            raise ValueError("shards: more than fragments, or none")
        for key, computed in (("tree_digest", self.tree_digest), ("config_digest", self.config.digest())):
            if fields[key] != computed:
                raise ValueError(f"{key}: {fields[key]:.32} is stored, {computed} was computed")

    def require_same(self, own: Manifest) -> None:
        """Raise MismatchError, with both values, unless a worker's manifest `own` equals this manifest of the run."""
        remedy = "Install the run's version of archipelago, or create another run with `archipelago init`."
        changed = configs.differences(self.config, own.config)
        if changed:
            raise MismatchError("config", self.config.digest(), f"{own.config.digest()} ({'; '.join(changed)})", remedy)
        if self.tree_digest != own.tree_digest:
            theirs, ours = ({(t.name, t.shape) for t in each.tensors} for each in (self, own))
            only_theirs, only_ours = sorted(theirs - ours)[:3], sorted(ours - theirs)[:3]
            values = f"{self.tree_digest} {only_theirs}", f"{own.tree_digest} {only_ours}"
            raise MismatchError("tree of tensors", *values, remedy)
        if self.corpus != own.corpus:
            raise MismatchError(
                f"corpus {self.corpus.name!r}",
                f"{self.corpus.digest} ({self.corpus.bytes:,} bytes)",
                f"{own.corpus.digest} ({own.corpus.bytes:,} bytes)",
                "Copy the prepared corpus from the machine that created the run. Or prepare the same file on both "
                "machines (`archipelago prepare FILE`), and create another run with its name as --data.corpus.",
            )
