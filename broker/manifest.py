"""The manifest: what every worker of a run agrees on. Config, corpus, the tree of tensors, and its fragments.

Shapes and dtypes come from here and never from a payload, so that a payload cannot ask for memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args

from archipelago.broker import config as configs
from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError, MismatchError
from archipelago.broker.redis.keys import checked_name

TensorKind = Literal["embedding", "rest"]
#: The packages whose versions a manifest records.
PACKAGES = ("archipelago-train", "jax", "jaxlib", "flax", "optax", "numpy", "redis")
MISSING = "not installed"


def installed_versions() -> dict[str, str]:
    """Return this machine's versions of the packages that a manifest records."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = MISSING
    return found


@dataclass(frozen=True)
class Tensor:
    """One float32 parameter tensor. `kind` chooses its merge rule (the paper averages embeddings, RDA for the rest)."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind = "rest"

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def balanced(tensors: Sequence[Tensor], count: int) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors of each of at most `count` fragments, balanced by size (the paper's choice).

    Largest first, each into the lightest bin: the peak is at most 4/3 of the optimal one (Graham 1969). Ties go by
    name and by index, so that every machine finds the same fragments. Never returns an empty fragment.
    """
    bins: list[list[str]] = [[] for _ in range(min(count, len(tensors)))]
    loads = [0] * len(bins)
    for tensor in sorted(tensors, key=lambda t: (-t.size, t.name)):
        lightest = loads.index(min(loads))
        bins[lightest].append(tensor.name)
        loads[lightest] += tensor.size
    return tuple(tuple(sorted(names)) for names in bins)


@dataclass(frozen=True)
class Corpus:
    """Which text the run trains on: a name to look up on this machine, and what must be found there."""

    name: str
    digest: str
    bytes: int
    """of the text"""
    tokenizer: str = ""
    """digest of what made tokens of it; empty where a token is a byte"""
    tokens: int = 0
    """that it made; 0 where a token is a byte"""

    def to_list(self) -> list[str | int]:
        """For JSON; of a corpus of bytes the same as before there were tokenizers."""
        own: list[str | int] = [self.name, self.digest, self.bytes]
        return [*own, self.tokenizer, self.tokens] if self.tokenizer else own

    @classmethod
    def from_list(cls, values: Sequence[str | int]) -> Corpus:
        """The corpus that `to_list` wrote. Raises ValueError for anything else."""
        name, digest, size, tokenizer, tokens = values if len(values) == 5 else (*values, "", 0)
        return cls(str(name), str(digest), int(size), str(tokenizer), int(tokens))


@dataclass(frozen=True)
class Manifest:
    """A run's identity. Equal manifests mean that contributions and snapshots fit each other."""

    run: str
    config: RunConfig
    tensors: tuple[Tensor, ...]
    fragments: tuple[tuple[str, ...], ...]
    corpus: Corpus
    versions: Mapping[str, str]
    """versions of the packages that made the run, for whoever debugs it later"""

    @cached_property
    def layout(self) -> tuple[tuple[tuple[Tensor, int], ...], ...]:
        """For each fragment its tensors, each with the offset of its first element in the fragment's flat vector."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        out = []
        for names in self.fragments:
            offset, rows = 0, []
            for name in names:
                rows.append((by_name[name], offset))
                offset += by_name[name].size
            out.append(tuple(rows))
        return tuple(out)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(sum(tensor.size for tensor, _ in rows) for rows in self.layout)

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return sum(self.sizes)

    def fragment_of(self, round_number: int) -> int:
        """The fragment that a round syncs: p = (t − 1) mod P."""
        return (round_number - 1) % len(self.fragments)

    def version_after(self, round_number: int) -> int:
        """The version of that fragment once the round has closed; rounds of a fragment close in order."""
        return (round_number - 1) // len(self.fragments) + 1

    @cached_property
    def tree_digest(self) -> str:
        """Sixteen hexadecimal digits that name the tree of tensors and its split into fragments."""
        tree = [[t.name, list(t.shape), t.kind] for t in self.tensors]
        text = json.dumps([tree, [list(names) for names in self.fragments]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_fields(self) -> dict[str, str]:
        """Plain text for a Redis hash, readable with HGETALL."""
        return {
            "run": self.run,
            "config": self.config.to_json(),
            "config_digest": self.config.digest(),
            "tensors": json.dumps([[t.name, list(t.shape), t.kind] for t in self.tensors]),
            "fragments": json.dumps([list(names) for names in self.fragments]),
            "tree_digest": self.tree_digest,
            "corpus": json.dumps(self.corpus.to_list()),
            "versions": json.dumps(dict(self.versions), sort_keys=True),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Manifest:
        """The manifest that `to_fields` wrote. Raises ConfigError when it was damaged or made by another version."""
        try:
            tensors = tuple(Tensor(str(n), tuple(map(int, s)), k) for n, s, k in json.loads(fields["tensors"]))
            manifest = cls(
                run=checked_name(fields["run"], "the run name"),
                config=configs.from_json(fields["config"]),
                tensors=tensors,
                fragments=tuple(tuple(map(str, names)) for names in json.loads(fields["fragments"])),
                corpus=Corpus.from_list(json.loads(fields["corpus"])),
                versions=dict(json.loads(fields["versions"])),
            )
            manifest._require_whole(fields)
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"the run's manifest cannot be read ({error!r})",
                "It was damaged or made by another version of archipelago. Make the run again with `archipelago init`.",
                code="config.manifest",
            ) from None
        return manifest

    def _require_whole(self, fields: Mapping[str, str]) -> None:
        """Raises ValueError unless the fragments partition the tensors and both digests are the stored ones."""
        names = sorted(name for fragment in self.fragments for name in fragment)
        if not names or names != sorted(tensor.name for tensor in self.tensors) or not all(self.fragments):
            raise ValueError("fragments: not a partition of the tensors")
        if not all(min(t.shape, default=1) > 0 and t.kind in get_args(TensorKind) for t in self.tensors):
            raise ValueError("tensors: an impossible shape or kind")
        for key, ours in (("tree_digest", self.tree_digest), ("config_digest", self.config.digest())):
            if fields[key] != ours:
                raise ValueError(f"{key}: {fields[key]:.32} is stored, {ours} was found")

    def require_same(self, ours: Manifest) -> None:
        """Raises MismatchError, with both values, unless a worker's own manifest `ours` equals this run's."""
        remedy = "Install the same version of archipelago as the run's, or start another run with `archipelago init`."
        changed = configs.differences(self.config, ours.config)
        if changed:
            raise MismatchError(
                "config", self.config.digest(), f"{ours.config.digest()} ({'; '.join(changed)})", remedy
            )
        if self.tree_digest != ours.tree_digest:
            theirs = {(t.name, t.shape) for t in self.tensors}
            mine = {(t.name, t.shape) for t in ours.tensors}
            raise MismatchError(
                "tree of tensors",
                f"{self.tree_digest} {sorted(theirs - mine)[:3]}",
                f"{ours.tree_digest} {sorted(mine - theirs)[:3]}",
                remedy,
            )
        if self.corpus != ours.corpus:
            raise MismatchError(
                f"corpus {self.corpus.name!r}",
                f"{self.corpus.digest} ({self.corpus.bytes:,} bytes)",
                f"{ours.corpus.digest} ({ours.corpus.bytes:,} bytes)",
                "Copy the prepared corpus from the machine that made the run, or prepare one both can make "
                "(`archipelago prepare FILE`), and name it with --data.corpus.",
            )
