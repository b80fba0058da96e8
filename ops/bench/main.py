"""The verbs of `archipelago bench`. Each measures ratios within one run, so that a busy machine slows both sides."""

from __future__ import annotations

from archipelago.ops.verbs import Verb, Verbs

VERBS: Verbs = {
    "parity": Verb("archipelago.ops.experiments.parity", "ParityOptions", "Loss of islands and of data-parallel."),
    "study": Verb("archipelago.ops.experiments.study", "StudyOptions", "A grid of trials, and its results."),
    "mixed": Verb("archipelago.ops.experiments.mixed", "MixedOptions", "JAX and PyTorch in one run."),
    "wire": Verb("archipelago.ops.bench.wire", "WireOptions", "Payloads through Redis, against bare sockets."),
    "merge": Verb("archipelago.ops.bench.merge", "MergeOptions", "Codecs and merging, against bare numpy."),
    "sync": Verb("archipelago.ops.bench.sync", "SyncOptions", "One outer synchronisation, against torchft's."),
    "signing": Verb("archipelago.ops.bench.signing", "SigningOptions", "What signatures add to a synchronisation."),
    "island": Verb("archipelago.ops.bench.island", "IslandBenchOptions", "What syncing costs an island."),
    "accelerator": Verb(
        "archipelago.ops.bench.accelerator", "AcceleratorOptions", "What an island costs on an accelerator."
    ),
    "islands": Verb("archipelago.ops.bench.many_islands", "ManyIslandsOptions", "What 4 to 256 islands cost a merger."),
    "shards": Verb("archipelago.ops.bench.shards", "ShardsOptions", "Rounds of two shards, against one merger."),
    "hosts": Verb("archipelago.ops.bench.hosts", "HostsBenchOptions", "What two hosts cost an island."),
    "join": Verb("archipelago.ops.bench.join", "JoinOptions", "What syncing costs a user's own training script."),
    "lora": Verb("archipelago.ops.bench.lora", "LoraOptions", "What islands send that fine-tune with LoRA."),
    "start": Verb("archipelago.ops.bench.start", "StartOptions", "What starting an island costs."),
    "largest": Verb("archipelago.ops.bench.largest", "LargestOptions", "The largest model that this machine can sync."),
}
