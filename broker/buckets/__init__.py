"""Checkpoints, optimiser states and corpora in buckets: object stores, and all other addresses that fsspec knows."""
