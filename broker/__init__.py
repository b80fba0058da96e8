"""The code that islands, mergers and operators share: settings, messages, codecs, and the clients of the broker.

Imports no JAX, so that a dashboard or a chaos driver starts in a blink.
"""
