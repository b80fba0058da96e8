"""Archipelago: train one model over many islands of compute that share nothing but a Redis."""
