"""What a sync weighs: bytes a parameter, up and down, for pairs of codecs, after zstd, on real outer gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from archipelago.broker.config import RunConfig
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import START
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.inner import InnerSteps, compile_steps
from archipelago.islands.models.registry import build
from archipelago.ops.experiments.virtual_time import VirtualRun

PAIRS = (
    ("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "int4"),
    ("e3m0", "e3m0"), ("top3", "int4"),
)  # fmt: skip
UNCOMPRESSED = 8.0
"""float32 both ways"""
ISLANDS = 2


def weigh(
    config: RunConfig, rounds: int, say: Callable[[str], None], pairs: Sequence[tuple[str, str]] = PAIRS
) -> dict[str, Any]:
    """A row for each pair of codecs, up and down, from so many rounds of a run in virtual time."""
    corpus, steps = open_corpus(config.data.corpus), compile_steps(build(config.model), config.inner)
    rows = []
    for up, down in pairs:
        wire = replace(config.wire, up=up, down=down)  # type: ignore[arg-type]
        rows.append({"up": up, "down": down, **_measured(replace(config, wire=wire), corpus, steps, rounds)})
        say(f"{up} up, {down} down: {rows[-1]['bytes_a_parameter']:.3f} bytes a parameter")
    return {"model": config.model.size, "rounds": rounds, "zstd_level": config.wire.zstd_level, "rows": rows}


def _measured(config: RunConfig, corpus: OpenCorpus, steps: InnerSteps, rounds: int) -> dict[str, float]:
    run = VirtualRun(config, corpus, steps, [1.0] * ISLANDS)
    run.advance_until(lambda: run.merger.state.closed >= rounds)
    sizes, tape = run.manifest.sizes, run.transport.tape(1 << 20)
    events = [event for _, event in run.transport.events(START, 0.0, 1 << 20)]
    closed = [event for event in events if isinstance(event, Snapshot) and event.version]
    up = sum(entry.bytes_up for entry in tape) / sum(sizes[entry.fragment] * len(entry.members) for entry in tape)
    down = sum(s.difference_bytes or s.bytes for s in closed) / sum(sizes[s.fragment] for s in closed)
    total = up + down
    return {"up_bytes": up, "down_bytes": down, "bytes_a_parameter": total, "of_float32": total / UNCOMPRESSED}
