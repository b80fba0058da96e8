"""Checkpoints, corpora and records in buckets: object stores, and any other address that fsspec understands."""
