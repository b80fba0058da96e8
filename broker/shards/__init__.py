"""Shards of a run: which fragments each has, how its rounds are numbered, and a connection to all of them."""
