"""Checkpoints and corpora in buckets: object stores, and any other address that fsspec understands."""
