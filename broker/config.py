"""A run's settings: frozen dataclasses, checked in one place, hashed, and stored with the run.

The defaults are chosen to be stable from 1 to 16 islands without tuning. Whatever is in here is part of the run's
identity: a worker whose settings differ is refused. What belongs to one worker only (its name, its device, its
folder) is not in here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from archipelago.broker.errors import ConfigError

BYTES = 256
"""the vocabulary of a text that is read byte by byte"""
SMALLEST_RATE = 3e-3
"""the inner learning rate of the smallest model"""
Positive = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0.0), Le(1.0)]
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class ModelConfig:
    """Which model the islands train."""

    __pydantic_config__ = _STRICT
    size: str = "tiny"
    """a model by name: tiny (0.1 M parameters), small (1 M), base (25 M), 124m, 1b; tiny-moe (0.3 M), small-moe (3 M)
    with 8 experts a layer; digits, for the corpus of that name"""
    vocabulary: Annotated[int, Ge(BYTES), Le(1 << 24)] = BYTES
    """tokens that a model of text knows; 256, for bytes, becomes that of the corpus's tokenizer where it has one"""


@dataclass(frozen=True)
class DataConfig:
    """What the islands read, and how a batch is cut from it."""

    __pydantic_config__ = _STRICT
    corpus: str = "stdlib"
    """a prepared corpus by name; `stdlib` is the Python standard library's own sources"""
    sequence_length: Annotated[int, Ge(2), Le(1 << 20)] = 128
    """tokens (bytes) a sequence; of a corpus of examples, the bytes of one without its label: 64 of digits"""
    batch_size: Annotated[int, Ge(1), Le(1 << 20)] = 8
    """sequences an inner step on one island"""
    shards: Annotated[int, Ge(1), Le(1 << 14)] = 64
    """pieces of the training text; an island leases one at a time, and no two islands the same one"""
    held_out_sequences: Annotated[int, Ge(1), Le(1 << 20)] = 256
    """sequences of held-out text that an evaluation reads"""


@dataclass(frozen=True)
class InnerConfig:
    """The inner optimiser, with linear warm-up and cosine decay by the global step."""

    __pydantic_config__ = _STRICT
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` is for matrices of hidden layers, and leaves embeddings, norms, routers and outputs to AdamW"""
    steps: Positive = 1500
    """global inner steps of the run: the fastest island's clock"""
    learning_rate: Annotated[float, Gt(0.0), Le(10.0)] | None = None
    """its peak; by default what suits the model's size, which a run is told when it is made"""
    warmup_steps: Annotated[int, Ge(0)] = 100
    final_share: Share = 0.1
    """the learning rate at the end, as a share of its peak"""
    weight_decay: Annotated[float, Ge(0.0), Le(10.0)] = 0.1
    beta1: Annotated[float, Ge(0.0), Lt(1.0)] = 0.9
    beta2: Annotated[float, Ge(0.0), Lt(1.0)] = 0.95
    muon_momentum: Annotated[float, Ge(0.0), Lt(1.0)] = 0.95
    clip_norm: Annotated[float, Ge(0.0)] = 1.0
    """gradients are clipped to this global norm; 0 clips nothing"""
    moments_warmup_steps: Annotated[int, Ge(0)] = 20
    """steps over which the learning rate grows while the optimiser's moments are fresh, as in an island that returns
    without them; 0 for none"""

    @property
    def peak(self) -> float:
        """The learning rate's; of a config that was not fitted to a model, the smallest one's."""
        return SMALLEST_RATE if self.learning_rate is None else self.learning_rate

    def rate_at(self, step: float) -> float:
        """The learning rate after so many steps: linear warm-up, then a cosine to the end, and no change from there."""
        warmup = min(self.warmup_steps, self.steps - 1)
        if step < warmup:
            return self.peak * (1 + step) / (warmup + 1)
        share = min(1.0, (step - warmup) / (self.steps - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * share))
        return self.peak * ((1.0 - self.final_share) * cosine + self.final_share)


@dataclass(frozen=True)
class SyncConfig:
    """Rounds: how often islands contribute, and how long a round stays open."""

    __pydantic_config__ = _STRICT
    interval: Annotated[int, Ge(1), Le(1 << 20)] = 24
    """H: inner steps between two syncs of the same fragment"""
    fragments: Annotated[int, Ge(1), Le(4096)] = 6
    """P: fragments that the tensors are split into (at most one a tensor)"""
    window: Annotated[int, Ge(1), Le(4096)] = 2
    """τ: rounds that are open at once"""
    quorum: Positive = 1
    """K: contributions that let a round close (or all the living, if fewer live)"""
    grace: Share = 0.9
    """γ: share of the slack (the paper's Eq. 3) that a round waits for more contributions after its quorum"""
    smoothing: Annotated[float, Ge(0.0), Lt(1.0)] = 0.8
    """decay of the moving averages behind the slack"""
    staleness_cap: Annotated[int, Ge(0)] = 16
    """a contribution whose base is more versions behind than this is refused"""


@dataclass(frozen=True)
class MergeConfig:
    """How the contributions of a round become one outer gradient."""

    __pydantic_config__ = _STRICT
    embedding: Literal["average", "rda"] = "average"
    rest: Literal["average", "rda"] = "rda"
    staleness: Literal["none", "polynomial"] = "polynomial"
    """s(staleness), the factor on a stale contribution's weight"""
    normalise: bool = True
    """divide the round's mean s by its running mean, so that staleness re-weighs but does not slow the run"""
    clip: Annotated[float, Ge(0.0)] = 3.0
    """clip a contribution to this multiple of the running median, by learning rate times steps; 0 clips nothing"""


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimiser, a step of which closes a round."""

    __pydantic_config__ = _STRICT
    rule: Literal["scheduled", "nesterov", "sgd"] = "scheduled"
    learning_rate: Annotated[float, Gt(0.0), Le(10.0)] = 0.7
    momentum: Annotated[float, Ge(0.0), Lt(1.0)] = 0.9
    """momentum of `nesterov`, and the largest momentum of `scheduled`; `sgd` has none"""
    cooldown: Share = 0.25
    """scheduled: the last share of the run, over which momentum falls to zero"""


@dataclass(frozen=True)
class AdoptConfig:
    """What an island does with a snapshot that arrives while it trains."""

    __pydantic_config__ = _STRICT
    rule: Literal["overwrite", "carry"] = "carry"


@dataclass(frozen=True)
class WireConfig:
    """How numbers travel."""

    __pydantic_config__ = _STRICT
    up: Literal["float32", "bfloat16", "int8", "int4", "e3m0", "top3"] = "int4"
    """codec of contributions"""
    thin: Literal["", "int8", "int4", "e3m0", "top3"] = "top3"
    """codec of contributions from an island whose link is too slow for the other one; empty for none"""
    down: Literal["float32", "bfloat16", "int8", "int4", "e3m0"] = "int4"
    """codec of snapshots; from int8 on, of differences against what the islands hold"""
    zstd_level: Annotated[int, Ge(0), Le(19)] = 1
    """0 leaves bodies uncompressed"""

    @property
    def sends_differences(self) -> bool:
        """Whether snapshots go down as differences; full ones are for newcomers and who missed some."""
        return self.down not in ("float32", "bfloat16")

    @property
    def full(self) -> str:
        """Codec of full snapshots."""
        return "float32" if self.sends_differences else self.down

    @property
    def full_zstd_level(self) -> int:
        """Level of full snapshots: none where differences go down, as each round makes one that few islands read."""
        return 0 if self.sends_differences else self.zstd_level


@dataclass(frozen=True)
class RunConfig:
    """Everything that makes two workers members of the same run."""

    __pydantic_config__ = _STRICT
    seed: Annotated[int, Ge(0), Lt(1 << 31)] = 0
    record: bool = False
    """keep all payloads and what islands did, so that `archipelago replay` can run it again"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    adopt: AdoptConfig = field(default_factory=AdoptConfig)
    wire: WireConfig = field(default_factory=WireConfig)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one inner step of one island trains on."""
        return self.data.batch_size * self.data.sequence_length

    def to_json(self) -> str:
        """Return canonical JSON: equal configs give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def digest(self) -> str:
        """Return sixteen hexadecimal digits that identify this config."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


@cache
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def checked(settings: RunConfig | Mapping[str, Any], source: str = "the settings") -> RunConfig:
    """Return the config if every value is in range. Raises ConfigError that names each wrong key and its value."""
    values = dataclasses.asdict(settings) if isinstance(settings, RunConfig) else settings
    try:
        return _adapter().validate_python(values)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].lower()}"
            + ("" if fault["type"] == "unexpected_keyword_argument" else f", not {fault['input']!r}")
            for fault in error.errors()
        ]
        unknown = any(fault["type"] == "unexpected_keyword_argument" for fault in error.errors())
        raise ConfigError(
            f"{source} cannot be used: " + "; ".join(faults),
            "See `archipelago init --help`.",
            code="config.unknown-key" if unknown else "config.value",
        ) from None


def from_json(text: str | bytes, source: str = "the run's stored config") -> RunConfig:
    """Return the config that `to_json` wrote. Raises ConfigError for other text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source} is not JSON ({error})", "Was the run made by another version?", code="config.not-json"
        ) from None
    return checked(values, source)


def from_toml(path: Path) -> RunConfig:
    """Return the config in a TOML file, with defaults for missing keys. Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the config file {path} cannot be read ({error.strerror})", "Check the path.", code="config.unreadable"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"the config file {path} is not TOML ({error})", "See https://toml.io.", code="config.not-toml"
        ) from None
    return checked(values, f"the config file {path}")


def differences(theirs: RunConfig, ours: RunConfig) -> list[str]:
    """Return `key: theirs → ours` for every setting in which two configs differ."""

    def flat(value: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {k: v for name, part in value.items() for k, v in flat(part, f"{prefix}.{name}".lstrip(".")).items()}

    a, b = flat(dataclasses.asdict(theirs), ""), flat(dataclasses.asdict(ours), "")
    return [f"{key}: {a[key]} → {b[key]}" for key in a if a[key] != b[key]]
