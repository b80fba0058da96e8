"""Trainers that people already use as islands, all over one membership. Nothing here imports JAX."""
