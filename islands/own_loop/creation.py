"""`archipelago.create`: a run from the parameters of a user's JAX script."""

from __future__ import annotations

from typing import Any

from archipelago.broker.config import AdoptConfig, MergeConfig, OuterConfig, SyncConfig, WireConfig
from archipelago.islands.own_loop.new_run import create_run, settings
from archipelago.islands.own_loop.tensors import EMBEDDINGS, KindOf, kinds_by
from archipelago.islands.own_loop.tree import TreeLayout, host_vector, require_values


def create(
    url: str | None,
    name: str,
    params: Any,
    *,
    steps: int,
    sync: SyncConfig | None = None,
    merge: MergeConfig | None = None,
    outer: OuterConfig | None = None,
    adopt: AdoptConfig | None = None,
    wire: WireConfig | None = None,
    kinds: str | KindOf = EMBEDDINGS,
    trained: Any = None,
    record: bool = False,
    shards: int = 1,
) -> bool:
    """Create a run for training scripts in JAX, which then `join` it. Its first parameters are those given.

    Args:
        url: The URL of the Redis (redis://HOST:PORT); None for $ARCHIPELAGO_URL.
        name: The name of the run.
        params: A tree of arrays: a dictionary, an `nnx.State`, or any other pytree with names. Leaves of float32,
            bfloat16 and float16 are merged, in float32. Others stay each island's own.
        steps: The length of the run in global inner steps, which count the steps of the fastest island.
        sync: How often islands contribute.
        merge: The rules that merge the contributions of a round.
        outer: The outer optimiser.
        adopt: How an island takes a snapshot.
        wire: The codecs.
        kinds: Which tensors are embeddings, for which `merge` has a rule of its own: a regular expression that is found
            in their names, or a function from a name to "embedding" or "rest".
        trained: Which leaves are trained: a regular expression that is found in their names, such as "lora", a function
            from a name to a boolean, or a tree of booleans like `params`. The other weights are frozen: `join` compares
            them by digest, and they are never sent. None trains all floating-point leaves.
        record: Keep all payloads, so that `archipelago replay` can merge the rounds again.
        shards: How many mergers share the work, for a model that is too large for one. One process serves all shards
            until others come.

    Returns:
        Whether this call created it: False if the run exists with these tensors and settings.

    Raises:
        ConfigError: The tree cannot be merged (`loop.nothing`, `loop.unnamed`, `loop.dtype`), `trained` does not fit it
            (`loop.trained`), the Redis is too small (`loop.too-large`), or islands of a lost run of that name are alive
            (`init.islands-live`).
        MismatchError: The run exists with other tensors (`loop.other-tensors`) or settings (`config.other-settings`).
        DivergedError: A leaf holds NaN or infinity (`loop.not-finite`).
    """
    config = settings(steps, sync, merge, outer, adopt, wire, record=record)
    layout = TreeLayout.of(params, trained)
    leaves = layout.leaves_of(params)
    for leaf, values in leaves.items():
        require_values(leaf, values)
    return create_run(
        url, name, config, shards, layout.tensors(kinds_by(kinds)), lambda leaf: host_vector([leaves[leaf]]),
        layout.frozen_values,
    )  # fmt: skip
