"""The operator's requests to a running run: the fields of the hash `RUN:control`, and the functions that parse them.

| field | value |
| --- | --- |
| `outer.learning_rate`, `sync.quorum`, `sync.grace` | a number, instead of the one in the run's config |
| `inner.steps` | the length of the run, instead of the one in its config |
| `merging` | `paused`: no round closes |
| `checkpoint` | any text; the merger takes a checkpoint when the text changes |
| `island.NAME` | `drain`: the island leaves as on SIGTERM; `expel`: it leaves, and the run refuses it from then on |

Every client of the Redis can write to the hash. A reader therefore uses the valid fields, and reports why it ignores
the others. All functions are pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Final

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.redis.keys import checked_name

OUTER_RATE: Final = "outer.learning_rate"
QUORUM: Final = "sync.quorum"
GRACE: Final = "sync.grace"
STEPS: Final = "inner.steps"
#: The settings of the run's config that an operator can steer.
SETTINGS: Final = (OUTER_RATE, QUORUM, GRACE, STEPS)
MERGING: Final = "merging"
PAUSED: Final = "paused"
CHECKPOINT: Final = "checkpoint"
ISLAND: Final = "island."
DRAIN: Final = "drain"
EXPEL: Final = "expel"
#: A request to an island, in words for the island and the operator.
IN_WORDS: Final = {DRAIN: "drained by the operator", EXPEL: "expelled by the operator"}
#: A reader ignores further fields.
FIELDS_MAX = 4096
#: The longest value, in characters.
VALUE_MAX = 64
_OWN = RunConfig()
_HELP = "Steer " + ", ".join((*SETTINGS, f"{MERGING}={PAUSED}", CHECKPOINT)) + " or island.NAME=drain|expel."


@dataclass(frozen=True)
class Control:
    """The operator's requests, as far as they are valid.

    Attributes:
        settings: The steered settings with their values. A quorum and a number of steps are whole numbers.
        is_paused: No round closes.
        checkpoint: The text of the last request for a checkpoint; empty if there was none.
        islands: `drain` or `expel`, by the island's name.
        faults: Why a field is ignored, by its name. An ignored setting keeps the value that it had.
        fields: The valid fields as text.
    """

    settings: Mapping[str, float] = field(default_factory=dict)
    is_paused: bool = False
    checkpoint: str = ""
    islands: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Control:
        """Parse the hash. Invalid fields raise nothing, and are listed in `faults`."""
        good: dict[str, str] = {}
        faults: dict[str, str] = {}
        for name, value in islice(fields.items(), FIELDS_MAX):
            try:
                good[name] = checked_value(_OWN, name, value)
            except ConfigError as error:
                faults[name[:VALUE_MAX]] = error.what
        if len(fields) > FIELDS_MAX:
            faults["…"] = f"{len(fields)} fields, of which {FIELDS_MAX} are read"
        return cls(
            settings={name: _checked_number(_OWN, name, good[name]) for name in SETTINGS if name in good},
            is_paused=good.get(MERGING) == PAUSED,
            checkpoint=good.get(CHECKPOINT, ""),
            islands={name.removeprefix(ISLAND): good[name] for name in good if name.startswith(ISLAND)},
            faults=faults,
            fields=good,
        )

    @property
    def expelled(self) -> frozenset[str]:
        """The names of the islands whose contributions are refused."""
        return frozenset(name for name, request in self.islands.items() if request == EXPEL)


def island_field(island: str) -> str:
    return ISLAND + island


def heard_by(island: str) -> tuple[str, str]:
    """Return the names of the fields that an island reads with each heartbeat: its own, and the length of the run."""
    return island_field(island), STEPS


def is_expelled(fields: Mapping[str, str], who: str) -> bool:
    """Return whether these fields expel `who` (island/incarnation)."""
    return fields.get(island_field(who.partition("/")[0])) == EXPEL


def require_welcome(fields: Mapping[str, str], island: str, run: str) -> None:
    """Raise ConfigError if the operator drained or expelled the island."""
    request = fields.get(island_field(island), "")
    if request in (DRAIN, EXPEL):
        state = "expelled" if request == EXPEL else "drained"
        raise ConfigError(
            f"the operator has {state} the island {island!r} from run {run!r}",
            f"To admit it, run `archipelago steer URL --run {run} {island_field(island)}=`, or use another --name.",
            code="control.unwelcome",
        )


def checked_changes(config: RunConfig, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the changes as they are written to the hash. An empty value removes a field. Raises ConfigError."""
    out = {}
    for name, value in changes.items():
        known = name.replace("-", "_") if name.startswith(("inner.", "outer.", "sync.")) else name
        out[known] = checked_value(config, known, value) if value else _checked_field(known)
    return out


def checked_value(config: RunConfig, name: str, value: str) -> str:
    """Return a field's value as it is written to the hash. Raises ConfigError for an invalid name or value."""
    _checked_field(name)
    if len(value) > VALUE_MAX or not value.isprintable():
        raise ConfigError(
            f"{name}={value!r:.80} cannot be used",
            f"Use at most {VALUE_MAX} printable characters.",
            code="control.value",
        )
    if name in SETTINGS:
        return repr(_checked_number(config, name, value))  # the shortest text that restores the same bits
    allowed = {MERGING: (PAUSED,), CHECKPOINT: (value,)}.get(name, (DRAIN, EXPEL))
    if value not in allowed:
        raise ConfigError(
            f"{name} cannot be {value!r}",
            f"It can be {' or '.join(allowed)}, or `{name}=` for neither.",
            code="control.value",
        )
    return value


def _checked_field(name: str) -> str:
    """Return an empty text, the value that removes the field. Raises ConfigError if the field does not exist."""
    if name.startswith(ISLAND):
        checked_name(name.removeprefix(ISLAND), "the island name")
    elif name not in (*SETTINGS, MERGING, CHECKPOINT):
        raise ConfigError(f"{name!r:.80} cannot be steered", _HELP, code="control.value")
    return ""


def _checked_number(config: RunConfig, name: str, value: str) -> float:
    section, _, key = name.partition(".")
    values = asdict(config)
    values[section][key] = value
    try:
        return own(checked(values, "the change"), name)
    except ConfigError as error:
        raise ConfigError(error.what, "See `archipelago steer --help`.", code="control.value") from None


# -- settings in force ------------------------------------------------------------------------------------------------


def own(config: RunConfig, name: str) -> float:
    """Return the value of a steerable setting in a config."""
    section, _, key = name.partition(".")
    value: float = getattr(getattr(config, section), key)
    return value


def in_force(config: RunConfig, before: Mapping[str, float], control: Control) -> dict[str, float]:
    """Return the settings that differ from the run's config once the requests apply.

    One that differed `before` and whose new value is invalid stays as it was.
    """
    ignored = {name: before[name] for name in SETTINGS if name in control.faults and name in before}
    return _differing(config, {**ignored, **control.settings})


def changes_text(config: RunConfig, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return the changes between two sets of settings as the tape records them: `name=value name=value`.

    A setting that is no longer steered appears with the value of the run's config.
    """
    old, new = steered(config, before), steered(config, after)
    return " ".join(f"{name}={own(new, name)!r}" for name in SETTINGS if own(old, name) != own(new, name))


def after_changes(config: RunConfig, before: Mapping[str, float], text: str) -> dict[str, float]:
    """Return the settings in force after the changes that the tape records. Raises WireError for an invalid change."""
    try:
        changes = read_settings({name: value for name, _, value in (each.partition("=") for each in text.split())})
    except ValueError as error:
        raise WireError(f"the tape's {text!r:.80}: {error}", code="wire.message") from None
    return _differing(config, {**before, **changes})


def steered(config: RunConfig, settings: Mapping[str, float]) -> RunConfig:
    """Return the config with these settings instead of its own values."""
    for name, value in settings.items():
        section, _, key = name.partition(".")
        kind = int if name in (QUORUM, STEPS) else float
        config = replace(config, **{section: replace(getattr(config, section), **{key: kind(value)})})
    return config


def run_steps(config: RunConfig, fields: Mapping[str, str], before: int | None = None) -> int:
    """Return the length of the run in steps: the one that an operator has set, or else the one in the run's config.

    An invalid request does not change the length until now.
    """
    control = Control.of({STEPS: fields[STEPS]} if STEPS in fields else {})
    if control.faults and before is not None:
        return before
    return int(control.settings.get(STEPS, config.inner.steps))


def _differing(config: RunConfig, values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in SETTINGS if name in values and values[name] != own(config, name)}


def fields_in(state: str) -> dict[str, str]:
    """Return the requests that a merger has followed, from its state as JSON. They are restored with a checkpoint."""
    try:
        found = json.loads(state or "{}").get("control", {})
        return dict(Control.of({str(name): str(value) for name, value in found.items()}).fields)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}


def read_settings(values: Mapping[str, object]) -> dict[str, float]:
    """Return the settings in a merger's state, or on the tape. Raises ValueError unless all are valid."""
    control = Control.of({str(name): str(value) for name, value in values.items()})
    if faults := [*control.faults.values(), *(values.keys() - set(SETTINGS))]:
        raise ValueError(f"{faults[0]:.80}")
    return dict(control.settings)
