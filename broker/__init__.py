"""What islands, mergers and operators share: messages, wire, codecs, keys, and the transports that carry them.

Imports no JAX, so that a dashboard or a chaos driver starts in a blink.
"""
