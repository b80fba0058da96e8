"""What an operator wishes of a running run: the hash `RUN:control`, text to text, and its reading. Pure.

| field | value |
| --- | --- |
| `outer.learning_rate`, `sync.quorum`, `sync.grace` | a number, instead of the one in the run's config |
| `merging` | `paused`: no round closes |
| `checkpoint` | any text: the merger takes a checkpoint when it differs from the one that it acted on last |
| `island.NAME` | `drain`: leave as on SIGTERM; `expel`: leave, and be refused from then on |

Whoever reaches the Redis can write there, so a reader takes what it can use, and says why not of the rest.
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
SETTINGS: Final = (OUTER_RATE, QUORUM, GRACE)
"""what can be steered of the run's config"""
MERGING: Final = "merging"
PAUSED: Final = "paused"
CHECKPOINT: Final = "checkpoint"
ISLAND: Final = "island."
DRAIN: Final = "drain"
EXPEL: Final = "expel"
IN_WORDS: Final = {DRAIN: "drained by the operator", EXPEL: "expelled by the operator"}
"""a wish for an island, as the island and the operator read it"""
FIELDS_MAX = 4096
"""fields that a reader looks at"""
VALUE_MAX = 64
"""characters of a value"""
_OWN = RunConfig()
_HELP = "Steer " + ", ".join((*SETTINGS, f"{MERGING}={PAUSED}", CHECKPOINT)) + " or island.NAME=drain|expel."


@dataclass(frozen=True)
class Control:
    """The operator's wishes as far as they can be read."""

    settings: Mapping[str, float] = field(default_factory=dict)
    """those of SETTINGS that are to be other than the run's own; a quorum is a whole number"""
    is_paused: bool = False
    checkpoint: str = ""
    islands: Mapping[str, str] = field(default_factory=dict)
    """`drain` or `expel`, by island"""
    faults: Mapping[str, str] = field(default_factory=dict)
    """why a field is ignored: what it would change stays as it is"""
    fields: Mapping[str, str] = field(default_factory=dict)
    """those that are not ignored"""

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Control:
        """Reads the hash; raises nothing."""
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
            settings={name: _number(name, good[name]) for name in SETTINGS if name in good},
            is_paused=good.get(MERGING) == PAUSED,
            checkpoint=good.get(CHECKPOINT, ""),
            islands={name.removeprefix(ISLAND): good[name] for name in good if name.startswith(ISLAND)},
            faults=faults,
            fields=good,
        )

    @property
    def expelled(self) -> frozenset[str]:
        """Names of the islands whose contributions are refused."""
        return frozenset(name for name, wish in self.islands.items() if wish == EXPEL)


def island_field(island: str) -> str:
    """Where the wish for that island stands."""
    return ISLAND + island


def is_expelled(fields: Mapping[str, str], who: str) -> bool:
    """Whether `who` (island/incarnation) is refused by these fields."""
    return fields.get(island_field(who.partition("/")[0])) == EXPEL


def require_welcome(fields: Mapping[str, str], island: str, run: str) -> None:
    """Raises ConfigError where the operator wants no island of that name."""
    wish = fields.get(island_field(island), "")
    if wish in (DRAIN, EXPEL):
        state = "is expelled from" if wish == EXPEL else "is to stay away (drained) from"
        raise ConfigError(
            f"the island {island!r} {state} run {run!r}, by its operator",
            f"`archipelago steer URL --run {run} {island_field(island)}=` lets it in again; or take another --name.",
            code="control.unwelcome",
        )


def checked_changes(config: RunConfig, changes: Mapping[str, str]) -> dict[str, str]:
    """The changes in the form in which they are written. An empty value removes a field. Raises ConfigError."""
    out = {}
    for name, value in changes.items():
        known = name.replace("-", "_") if name.startswith(("outer.", "sync.")) else name
        out[known] = checked_value(config, known, value) if value else _checked_field(known)
    return out


def checked_value(config: RunConfig, name: str, value: str) -> str:
    """A field's value in the form in which it is written. Raises ConfigError for one that cannot be used."""
    _checked_field(name)
    if len(value) > VALUE_MAX or not value.isprintable():
        raise ConfigError(
            f"{name}={value!r:.80} cannot be used",
            f"Use at most {VALUE_MAX} printable characters.",
            code="control.value",
        )
    if name in SETTINGS:
        return _text(_checked_number(config, name, value))
    allowed = {MERGING: (PAUSED,), CHECKPOINT: (value,)}.get(name, (DRAIN, EXPEL))
    if value not in allowed:
        raise ConfigError(
            f"{name} cannot be {value!r}",
            f"It can be {' or '.join(allowed)}, or `{name}=` for neither.",
            code="control.value",
        )
    return value


def _checked_field(name: str) -> str:
    """Empty text, for a field that is one."""
    if name.startswith(ISLAND):
        checked_name(name.removeprefix(ISLAND), "the island name")
    elif name not in (*SETTINGS, MERGING, CHECKPOINT):
        raise ConfigError(f"{name!r:.80} cannot be steered", _HELP, code="control.unknown-field")
    return ""


def _checked_number(config: RunConfig, name: str, value: str) -> float:
    section, _, key = name.partition(".")
    values = asdict(config)
    values[section][key] = value
    try:
        return own(checked(values, "the change"), name)
    except ConfigError as error:
        raise ConfigError(error.what, "See `archipelago steer --help`.", code="control.value") from None


def _number(name: str, text: str) -> float:
    return _checked_number(_OWN, name, text)


def _text(number: float) -> str:
    return repr(number)  # the shortest text that gives the same bits again


# -- what is in force -------------------------------------------------------------------------------------------------


def own(config: RunConfig, name: str) -> float:
    """A steerable setting's value in a config."""
    section, _, key = name.partition(".")
    value: float = getattr(getattr(config, section), key)
    return value


def in_force(config: RunConfig, before: Mapping[str, float], control: Control) -> dict[str, float]:
    """The settings that are other than the run's own, once the control is followed; `before` is what they were."""
    ignored = {name: before[name] for name in SETTINGS if name in control.faults and name in before}
    return _differing(config, {**ignored, **control.settings})


def changes_text(config: RunConfig, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What changed from one to the other, as the tape has it: `name=value name=value`.

    A setting that is steered no longer has the run's own value there.
    """
    old, new = steered(config, before), steered(config, after)
    return " ".join(f"{name}={_text(own(new, name))}" for name in SETTINGS if own(old, name) != own(new, name))


def after_changes(config: RunConfig, before: Mapping[str, float], text: str) -> dict[str, float]:
    """What is in force once the changes on the tape have been made. Raises WireError for what is none."""
    values = dict(before)
    for change in text.split():
        name, _, value = change.partition("=")
        try:
            if name not in SETTINGS:
                raise ConfigError(f"{name!r:.80} cannot be steered", code="control.unknown-field")
            values[name] = _number(name, value)
        except ConfigError as error:
            raise WireError(f"the tape's {change!r:.80}: {error.what}", code="wire.tape") from None
    return _differing(config, values)


def read_settings(values: Mapping[str, object]) -> dict[str, float]:
    """Settings as a state or a checkpoint keeps them. Raises ConfigError."""
    return {str(name): _number(str(name), checked_value(_OWN, str(name), str(value))) for name, value in values.items()}


def steered(config: RunConfig, settings: Mapping[str, float]) -> RunConfig:
    """The config with these settings instead of its own."""
    sync, outer = config.sync, config.outer
    return replace(
        config,
        sync=replace(sync, quorum=int(settings.get(QUORUM, sync.quorum)), grace=settings.get(GRACE, sync.grace)),
        outer=replace(outer, learning_rate=settings.get(OUTER_RATE, outer.learning_rate)),
    )


def _differing(config: RunConfig, values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in SETTINGS if name in values and values[name] != own(config, name)}


def fields_in(state: str) -> dict[str, str]:
    """The wishes that a merger had acted on, from its state as JSON: a Redis that lost everything gets them back."""
    try:
        return read_fields(json.loads(state or "{}").get("control", {}))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}


def read_fields(values: Mapping[str, object]) -> dict[str, str]:
    """The same fields from a map, without those that cannot be used."""
    return dict(Control.of({str(name): str(value) for name, value in values.items()}).fields)
