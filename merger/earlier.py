"""Checkpoints of earlier versions, from 0.2 on: what a run is continued with.

Parameters, the outer optimiser's state, the step, the counters, the tape, the positions in the text and held-out losses
are taken over. The accounts of islands begin anew, and contributions that waited are left behind.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from pydantic import ValidationError

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import adapter
from archipelago.merger.state import RunState

log = logging.getLogger(__name__)


def taken_over(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an earlier version's checkpoint as this version writes them.

    Raises:
        ConfigError: Its config cannot be used.
        WireError: Something else of it cannot be read.
    """
    manifest = dict(fields["manifest"])
    config, dropped = _config(manifest["config"])
    manifest |= {"config": config.to_json(), "config_digest": config.digest()}
    if dropped:
        log.warning("an earlier version wrote this checkpoint; the defaults replace its %s", ", ".join(dropped))
    try:
        before = json.loads(fields["state"])
        state = RunState(
            closed=int(before["closed"]),
            step=int(before["step"]),
            tokens=int(before["tokens"]),
            merged=int(before["merged"]),
            bytes_up=int(fields["books"]["bytes_up"]),
            cursors={name: (of_pass, sequence) for name, (of_pass, sequence) in fields["cursors"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"its state is of another version ({error!r:.80})", code="wire.message") from None
    counters = fields["books"] | {"refused": "0", "refused_tokens": "0"}
    return fields | {"manifest": manifest, "state": state.to_json(), "counters": counters, "pending": []}


def _config(text: str) -> tuple[RunConfig, list[str]]:
    """Return the config that an earlier version wrote, and the names of its settings that this one cannot use.

    These have the defaults of this version. Raises ConfigError for text that is no such config.
    """
    dropped: list[str] = []
    try:
        values = json.loads(text)
        try:
            adapter(RunConfig).validate_python(values)
        except ValidationError as error:
            # A setting that may be of several types has a fault for each of them.
            for section, *key in sorted({fault["loc"][:2] for fault in error.errors()}):
                (values[section] if key else values).pop(key[0] if key else section)
                dropped.append(".".join(map(str, (section, *key))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the stored config cannot be read ({error!r:.80})", "", code="config.manifest") from None
    return checked(values, "the stored config"), dropped
