"""A run's settings: frozen dataclasses that are validated together, hashed, and stored with the run.

The defaults are stable from 1 to 16 islands without tuning. All settings here are part of the run's identity: a worker
with different settings cannot join. Settings of a single worker (its name, its device, its folder) are elsewhere.

The `Attributes` sections are also the help texts of the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import ConfigDict, ValidationError

from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import adapter
from archipelago.broker.ranges import RANGES_MAX

#: The vocabulary size of a corpus whose tokens are bytes.
BYTES = 256
#: The model of a run whose islands train a model of its users, by their scripts or as a task. The run knows its
#: tensors, and not how to compute it.
OWN_MODEL = "own"
#: An inner step of a user's own loop has at most this many tokens. What counts as one is up to the loop.
OWN_TOKENS_PER_STEP_MAX = 1 << 32
#: An island may train batches that are larger than the run's by this factor, because weights grow with tokens squared.
BATCH_FACTOR_MAX = 64
#: The inner learning rate of the smallest model.
SMALLEST_RATE = 6e-3
Positive = Annotated[int, Ge(1)]
#: More inner steps than any run makes. Counts of steps stay far below the end of int32.
STEPS_MAX = 1 << 30
Share = Annotated[float, Ge(0.0), Le(1.0)]
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class ModelConfig:
    """The model that the islands train.

    Attributes:
        size: The model's name: tiny (0.1 M parameters), small (1 M), base (25 M), 124m or 1b; tiny-moe (0.3 M) or
            small-moe (3 M), with 8 experts per layer.
        vocabulary: The number of tokens that the model knows. 256 stands for bytes; if the corpus has a tokenizer,
            `archipelago init` replaces 256 with the tokenizer's size.
        compute_dtype: The dtype of activations, and of the copies of parameters that layers compute with. Masters,
            moments and everything that is sent stay float32. `device` is bfloat16 on accelerators, float32 on CPUs.
        scan_layers: Compile one layer and repeat it, so that the program does not grow with the layers. It costs one
            copy of the layers' parameters a step.
        rematerialise: Whether to compute each layer again in the backward pass, in place of keeping its activations:
            less memory for a third more time. `large` does so for the model 1b, which fills an 80 GB card otherwise.
    """

    __pydantic_config__ = _STRICT
    size: str = "tiny"
    vocabulary: Annotated[int, Ge(BYTES), Le(1 << 24)] = BYTES
    compute_dtype: Literal["device", "float32", "bfloat16"] = "device"
    scan_layers: bool = False
    rematerialise: Literal["large", "always", "never"] = "large"

    @property
    def recomputes_layers(self) -> bool:
        """Whether the backward pass computes each layer again."""
        return self.rematerialise == "always" or (self.rematerialise == "large" and self.size == "1b")


@dataclass(frozen=True)
class DataConfig:
    """The data that the islands read, and the size of a batch.

    Attributes:
        corpus: The name of a prepared corpus. `stdlib` is the source code of Python's standard library.
        sequence_length: Tokens per sequence.
        batch_size: Sequences per inner step on one island.
        shards: The number of ranges of the training text. An island leases one range at a time, and no two islands hold
            the same one.
        held_out_sequences: Sequences of held-out text that one evaluation reads.
    """

    __pydantic_config__ = _STRICT
    corpus: str = "stdlib"
    sequence_length: Annotated[int, Ge(2), Le(1 << 20)] = 128
    batch_size: Annotated[int, Ge(1), Le(1 << 20)] = 8
    shards: Annotated[int, Ge(1), Le(RANGES_MAX)] = 64
    held_out_sequences: Annotated[int, Ge(1), Le(1 << 20)] = 256


@dataclass(frozen=True)
class InnerConfig:
    """The inner optimiser, with linear warm-up and cosine decay by the global step.

    Attributes:
        optimizer: The optimiser. `muon` updates the matrices of hidden layers, and uses AdamW for embeddings, norms,
            routers and outputs.
        steps: Length of the run in global inner steps, which count the steps of the fastest island. It can be changed
            later with `archipelago steer inner.steps=N`.
        learning_rate: Peak of the learning rate. By default `archipelago init` chooses it by the model's size.
        warmup_steps: Steps of linear warm-up at the start of the run.
        final_share: The learning rate at the end, as a share of its peak.
        weight_decay: Weight decay of the optimiser.
        beta1: Decay of the first moments of AdamW.
        beta2: Decay of the second moments of AdamW.
        muon_momentum: Momentum of Muon.
        clip_norm: Gradients are clipped to this global norm; 0 turns clipping off.
        moments_warmup_steps: Steps of warm-up for an island whose optimiser moments start from zero, such as one that
            rejoins without them; 0 turns it off.
        micro_batches: Gradients are computed in this many equal parts of a batch, one after the other, and averaged. It
            divides the memory of activations, and changes no result but for rounding.
    """

    __pydantic_config__ = _STRICT
    optimizer: Literal["adamw", "muon"] = "adamw"
    steps: Annotated[int, Ge(1), Le(STEPS_MAX)] = 1500
    learning_rate: Annotated[float, Gt(0.0), Le(10.0)] | None = None
    warmup_steps: Annotated[int, Ge(0)] = 100
    final_share: Share = 0.1
    weight_decay: Annotated[float, Ge(0.0), Le(10.0)] = 0.1
    beta1: Annotated[float, Ge(0.0), Lt(1.0)] = 0.9
    beta2: Annotated[float, Ge(0.0), Lt(1.0)] = 0.99
    muon_momentum: Annotated[float, Ge(0.0), Lt(1.0)] = 0.95
    clip_norm: Annotated[float, Ge(0.0)] = 1.0
    moments_warmup_steps: Annotated[int, Ge(0)] = 20
    micro_batches: Annotated[int, Ge(1), Le(1 << 20)] = 1

    @property
    def peak(self) -> float:
        """The peak of the learning rate. Until a model's size has set it, this is the rate of the smallest model."""
        return SMALLEST_RATE if self.learning_rate is None else self.learning_rate

    def rate_at(self, step: float) -> float:
        """Return the learning rate after `step` steps: linear warm-up, then cosine decay, then a constant."""
        warmup = min(self.warmup_steps, self.steps - 1)
        if step < warmup:
            return self.peak * (1 + step) / (warmup + 1)
        share = min(1.0, (step - warmup) / (self.steps - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * share))
        return self.peak * ((1.0 - self.final_share) * cosine + self.final_share)


@dataclass(frozen=True)
class SyncConfig:
    """Rounds: how often islands contribute, and how long a round stays open.

    Attributes:
        interval: H: inner steps between two syncs of the same fragment.
        fragments: P: the number of fragments that the tensors are split into, at most one per tensor.
        window: τ: the number of rounds that can be open at once.
        quorum: K: contributions that a round needs before it can close. If fewer islands are live, all of theirs are
            enough.
        grace: γ: the share of the slack (the paper's Eq. 3) that a round waits for more contributions after its quorum.
        smoothing: Decay of the moving averages from which the slack is computed.
        staleness_cap: The merger refuses a contribution whose base is more versions behind than this.
    """

    __pydantic_config__ = _STRICT
    interval: Annotated[int, Ge(1), Le(1 << 20)] = 24
    fragments: Annotated[int, Ge(1), Le(4096)] = 6
    window: Annotated[int, Ge(1), Le(4096)] = 2
    quorum: Positive = 1
    grace: Share = 0.9
    smoothing: Annotated[float, Ge(0.0), Lt(1.0)] = 0.8
    staleness_cap: Annotated[int, Ge(0)] = 16


@dataclass(frozen=True)
class MergeConfig:
    """The rules that merge the contributions of a round into one outer gradient.

    Attributes:
        embedding: The merge rule of embedding tensors.
        rest: The merge rule of all other tensors. `isotropic` is `rda` where a contribution holds a fifth of the run.
        embedding_exponent: The power of its singular values that `isotropic` leaves of an embedding: 0 or 0.5.
        rest_exponent: The same for all other matrices. 0 makes all singular values equal.
        isotropic_side_max: `isotropic` cuts matrices whose shorter side is longer than this into equal blocks of at
            most as many rows or columns, because it takes some 20 operations times that side for each parameter.
        staleness: s(staleness): the factor on the weight of a stale contribution.
        normalise: Divide the round's mean s by its running mean. Staleness then changes the weights, but does not slow
            the run.
        clip: Clip the norm of a contribution to this multiple of the running median. Norms are compared after division
            by learning rate times steps. 0 turns clipping off.
        share_cap: No island weighs more than this many times the mean of the other islands of its round. Raise it for a
            fleet in which one island does much more work than the others.
        scores: Lower the weight of islands whose contributions point elsewhere than those of the others, and clip norms
            that stay above the usual one. It needs three islands.
        expel_after: Expel an island whose weight was lowered in this many rounds in a row. `archipelago steer` admits
            it again. 0 turns this off.
    """

    __pydantic_config__ = _STRICT
    embedding: Literal["average", "rda", "isotropic"] = "isotropic"
    rest: Literal["average", "rda", "isotropic"] = "isotropic"
    embedding_exponent: Annotated[float, Ge(0.0), Le(0.5), MultipleOf(0.5)] = 0.5
    rest_exponent: Annotated[float, Ge(0.0), Le(0.5), MultipleOf(0.5)] = 0.0
    isotropic_side_max: Annotated[int, Ge(1), Le(1 << 20)] = 1024
    staleness: Literal["none", "polynomial"] = "polynomial"
    normalise: bool = True
    clip: Annotated[float, Ge(0.0)] = 3.0
    share_cap: Annotated[float, Ge(1.0)] = 2.0
    scores: bool = True
    expel_after: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimiser, which takes one step when a round closes.

    Attributes:
        rule: The update rule. `scheduled` is Nesterov momentum that follows a schedule.
        learning_rate: The outer learning rate.
        momentum: Momentum of `nesterov`, and the largest momentum of `scheduled`. `sgd` has none.
        cooldown: Only for `scheduled`: the last share of the run, during which the momentum falls to zero.
    """

    __pydantic_config__ = _STRICT
    rule: Literal["scheduled", "nesterov", "sgd"] = "scheduled"
    learning_rate: Annotated[float, Gt(0.0), Le(10.0)] = 0.7
    momentum: Annotated[float, Ge(0.0), Lt(1.0)] = 0.9
    cooldown: Share = 0.25


@dataclass(frozen=True)
class AdoptConfig:
    """The rule by which an island takes a snapshot that arrives while it trains.

    Attributes:
        rule: `overwrite` replaces the island's parameters, and with them what the codec left out when the island last
            sent the fragment. So it refuses `top3` as `wire.up`, and uses no codec for thin links. `carry` also adds
            the steps that the island has taken since it last sent the fragment.
    """

    __pydantic_config__ = _STRICT
    rule: Literal["overwrite", "carry"] = "carry"


@dataclass(frozen=True)
class WireConfig:
    """The codecs of contributions and snapshots.

    Attributes:
        up: The codec of contributions.
        thin: The codec of contributions from an island whose link is too slow for `up`; empty for none.
        down: The codec of snapshots. From `int8` on, it encodes differences from the parameters that the islands hold.
        zstd_level: The zstd compression level of payloads; 0 leaves them uncompressed.
    """

    __pydantic_config__ = _STRICT
    up: Literal["float32", "bfloat16", "int8", "int4", "top3"] = "int4"
    thin: Literal["", "int8", "int4", "top3"] = "top3"
    down: Literal["float32", "bfloat16", "int8", "int4"] = "int4"
    zstd_level: Annotated[int, Ge(0), Le(19)] = 1

    @cached_property
    def sends_differences(self) -> bool:
        """Whether snapshots travel as differences. An island that is new or has missed some gets a full snapshot."""
        return self.down not in ("float32", "bfloat16")

    @cached_property
    def full(self) -> str:
        return "float32" if self.sends_differences else self.down

    @property
    def full_zstd_level(self) -> int:
        """The zstd level of full snapshots: 0 with differences, since few islands then read the full ones."""
        return 0 if self.sends_differences else self.zstd_level


@dataclass(frozen=True)
class RunConfig:
    """All settings that the workers of a run share.

    Attributes:
        seed: The seed of the initial parameters and of the order of the data.
        record: Keep all payloads, so that `archipelago replay` can merge the rounds again.
    """

    __pydantic_config__ = _STRICT
    seed: Annotated[int, Ge(0), Lt(1 << 31)] = 0
    record: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    adopt: AdoptConfig = field(default_factory=AdoptConfig)
    wire: WireConfig = field(default_factory=WireConfig)

    @cached_property
    def has_user_loops(self) -> bool:
        """Whether the islands train a model of their users: by their scripts, or as a task."""
        return self.model.size == OWN_MODEL

    @property
    def thin(self) -> str:
        """The codec for thin links; empty with `overwrite`, which drops what a codec leaves out."""
        return self.wire.thin if self.adopt.rule == "carry" else ""

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


_UNKNOWN = "unexpected_keyword_argument"


def _similar(unknown: str) -> str:
    """Return a question about the setting whose name is most similar; empty if there is none."""
    found = difflib.get_close_matches(unknown, flat(RunConfig()), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def checked(
    settings: RunConfig | Mapping[str, Any],
    source: str = "the settings",
    remedy: str = "See `archipelago init --help`.",
) -> RunConfig:
    """Return the config if every value is in range. Raises ConfigError that names each wrong key and its value."""
    values = dataclasses.asdict(settings) if isinstance(settings, RunConfig) else settings
    try:
        config: RunConfig = adapter(RunConfig).validate_python(values)
    except ValidationError as error:
        found = [(".".join(map(str, fault["loc"])), fault) for fault in error.errors()]
        unknown = [key for key, fault in found if fault["type"] == _UNKNOWN]
        known = [f"{key}: {fault['msg'].lower()}, not {fault['input']!r}" for key, fault in found if key not in unknown]
        faults = [*(f"there is no setting {key}{_similar(key)}" for key in unknown), *known]
        code = "config.unknown-key" if unknown else "config.value"
        raise ConfigError(f"{source} cannot be used: " + "; ".join(faults), remedy, code=code) from None
    if config.adopt.rule == "overwrite" and config.wire.up == "top3":
        what = f"{source} cannot be used: adopt.rule overwrite drops what wire.up top3 leaves out"
        raise ConfigError(what, "Choose adopt.rule carry, or another codec for wire.up.", code="config.value")
    return config


def from_json(text: str | bytes) -> RunConfig:
    """Return the config that `to_json` wrote. Raises ValueError for text that is not JSON, and else ConfigError."""
    remedy = (
        "Another version of archipelago created the run. Go on with that version, or export the model with it and "
        "begin a new run from that (`archipelago init --from FOLDER`)."
    )
    return checked(json.loads(text), "the run's stored config", remedy)


def from_toml(path: Path) -> RunConfig:
    """Return the config in a TOML file, with defaults for missing keys. Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not TOML: {error}"
        remedy = "Check the path and the file (https://toml.io)."
        raise ConfigError(f"the config file {path} cannot be read ({why})", remedy, code="config.file") from None
    return checked(values, f"the config file {path}")


def differences(theirs: RunConfig, ours: RunConfig) -> list[str]:
    """Return `key: theirs → ours` for every setting in which two configs differ."""
    return [f"{key}: {their} → {our}" for key, (their, our) in differing(theirs, ours).items()]


def differing(theirs: RunConfig, ours: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return both values of every setting in which two configs differ, by its name."""
    a, b = flat(theirs), flat(ours)
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def flat(settings: RunConfig | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings by their whole names, such as `sync.interval`."""
    out: dict[str, Any] = {}
    for name, value in (dataclasses.asdict(settings) if isinstance(settings, RunConfig) else settings).items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out
