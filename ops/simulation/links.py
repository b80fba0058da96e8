"""Bandwidth that training between sites needs, by formula; and the bytes that a run of ours sends. Pure.

After Decoupled DiLoCo (arXiv 2604.21428), Table 13: compute utilisation is T_math / (T_math + T_comm), T_comm being the
communication that no computation hides, and a ring over D sites carries 2(D − 1)/D of the bytes over each link.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.broker.codecs import codec

FORWARD_SHARE = 1.0 / 3.0
"""of an inner step, in which data-parallel has no gradients to send yet"""
TABLE_INTERVAL, TABLE_HIDDEN_STEPS = 100.0, 36.0
"""the whole numbers that fit Table 13 best: H, and the steps of an interval in which fragments travel unnoticed. The
paper trains with H = P = 24 and τ = 2; Table 13 does not follow from these (43 % rms)."""


def ring_factor(sites: int) -> float:
    """Bytes over each link to the bytes that are reduced, for `sites` in a ring: 2(D − 1)/D."""
    return 2.0 * (sites - 1) / sites


def data_parallel_gbits(
    parameters: float, bits: float, step_seconds: float, sites: int, utilisation: float, forward: float = FORWARD_SHARE
) -> float:
    """Gbit/s for data-parallel to reach this utilisation, a share below 1.

    A step takes T/CU in all. Gradients leave during the backward pass, so all of it but the forward pass is there to
    send them in: B = ring · N · bits / (T/CU − T · forward).
    """
    return ring_factor(sites) * parameters * bits / 1e9 / (step_seconds * (1.0 / utilisation - forward))


def fragments_gbits(
    parameters: float,
    bits: float,
    step_seconds: float,
    sites: int,
    utilisation: float,
    interval: float = TABLE_INTERVAL,
    hidden_steps: float = TABLE_HIDDEN_STEPS,
) -> float:
    """Gbit/s for fragments that travel behind inner steps to reach this utilisation.

    In an interval of H steps each fragment is sent once. Each of P transfers may take τ steps unnoticed (P·τ is
    `hidden_steps`); what it takes beyond that is waited for, and an interval takes H·T/CU in all. So
    B = ring · N · bits / (T · (H · (1/CU − 1) + P·τ)).
    """
    waited = interval * (1.0 / utilisation - 1.0)
    return ring_factor(sites) * parameters * bits / 1e9 / (step_seconds * (waited + hidden_steps))


@dataclass(frozen=True)
class Load:
    """Bytes a second of a run of ours, whose islands reach each other through one Redis, before zstd."""

    up: float
    """from one island to Redis"""
    down: float
    """from Redis to one island"""
    redis_in: float
    """into the Redis from all islands, and from the merger that is beside it"""
    redis_out: float
    """out of it, to all islands and to the merger"""
    fragment_up_seconds: float
    """one fragment's way up an island's link; infinite without a link"""


def load(
    parameters: int,
    islands: int,
    step_seconds: float,
    interval: int,
    fragments: int,
    up: str,
    down: str,
    link_bytes_a_second: float,
) -> Load:
    """What a run with these settings sends; `interval` is H, `fragments` P, `up` and `down` codecs by name."""
    interval_seconds = interval * step_seconds
    up_bytes, down_bytes = (codec(name).encoded_size(parameters) for name in (up, down))
    each_up, each_down = up_bytes / interval_seconds, down_bytes / interval_seconds
    return Load(
        up=each_up,
        down=each_down,
        redis_in=islands * each_up + each_down,
        redis_out=islands * (each_up + each_down),
        fragment_up_seconds=up_bytes / fragments / link_bytes_a_second if link_bytes_a_second else float("inf"),
    )
