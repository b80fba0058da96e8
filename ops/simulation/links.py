"""The bandwidth that training between sites needs, by formula, and the bytes that our own runs send. Pure.

After Decoupled DiLoCo (arXiv 2604.21428), Table 13. Compute utilisation is T_math / (T_math + T_comm), where T_comm is
the communication that no computation hides. A ring over D sites carries 2(D − 1)/D of the bytes over each link.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.broker.codecs import codec

#: The share of an inner step in which data-parallel has no gradients to send yet.
FORWARD_SHARE = 1.0 / 3.0
#: The whole numbers that fit Table 13 best: H, and the steps of an interval that hide the fragments' transfers. The
#: paper trains with H = P = 24 and τ = 2, but Table 13 does not follow from these (43 % rms).
TABLE_INTERVAL, TABLE_HIDDEN_STEPS = 100.0, 36.0


def ring_factor(sites: int) -> float:
    """Return the bytes over each link per byte that is reduced, for D `sites` in a ring: 2(D − 1)/D."""
    return 2.0 * (sites - 1) / sites


def data_parallel_gbits(
    parameters: float, bits: float, step_seconds: float, sites: int, utilisation: float, forward: float = FORWARD_SHARE
) -> float:
    """Return the Gbit/s with which data-parallel reaches this utilisation, a share below 1.

    A step takes T/CU in all. Gradients leave during the backward pass, so everything but the forward pass can send
    them: B = ring · N · bits / (T/CU − T · forward).
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
    """Return the Gbit/s with which fragments that travel behind inner steps reach this utilisation.

    In an interval of H steps, each fragment is sent once. Inner steps hide τ steps of each of the P transfers (P·τ is
    `hidden_steps`). The islands wait for the rest, and an interval takes H·T/CU in all. So
    B = ring · N · bits / (T · (H · (1/CU − 1) + P·τ)).
    """
    waited = interval * (1.0 / utilisation - 1.0)
    return ring_factor(sites) * parameters * bits / 1e9 / (step_seconds * (waited + hidden_steps))


@dataclass(frozen=True)
class Load:
    """Bytes per second of our own run, whose islands share one Redis, before zstd.

    Attributes:
        up: From one island to Redis.
        down: From Redis to one island.
        redis_in: Into Redis, from all islands and from the merger beside it.
        redis_out: Out of Redis, to all islands and to the merger.
        fragment_up_seconds: How long one fragment takes up an island's link; infinite without a link.
    """

    up: float
    down: float
    redis_in: float
    redis_out: float
    fragment_up_seconds: float


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
    """Return the load of a run. `interval` is H, `fragments` is P, `up` and `down` are names of codecs."""
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
