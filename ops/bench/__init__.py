"""`archipelago bench`: measurements, each of ratios within one run, so that a busy machine slows both sides."""

from __future__ import annotations

from archipelago.ops.commands import Verb, Verbs

VERBS: Verbs = {
    "parity": Verb("archipelago.ops.experiments.parity", "ParityOptions", "Loss of islands and of data-parallel."),
    "study": Verb("archipelago.ops.experiments.study", "StudyOptions", "A grid of trials, and its results."),
    "wire": Verb("archipelago.ops.bench.wire", "WireOptions", "Payloads through Redis, against bare sockets."),
    "merge": Verb("archipelago.ops.bench.merge", "MergeOptions", "Codecs and merging, and many islands."),
    "sync": Verb("archipelago.ops.bench.sync", "SyncOptions", "One outer synchronisation, against torchft's."),
    "accelerator": Verb(
        "archipelago.ops.bench.accelerator", "AcceleratorOptions", "What an island costs on this device."
    ),
    "largest": Verb("archipelago.ops.bench.largest", "LargestOptions", "The largest model that this machine can sync."),
}
