"""Islands that are training scripts of their users: `archipelago.create` and `archipelago.join`.

`joining`, `parameters` and `tree` are for JAX. The other modules do not import it, so that another framework can use
them.
"""
