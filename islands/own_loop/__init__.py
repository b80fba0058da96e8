"""Islands that are training scripts of their users: `archipelago.create` and `archipelago.join`.

`session`, `handover`, `loop`, `new_run`, `reported`, `signals`, `soundness` and `tensors` do not import JAX, so that
another framework can use them. The other modules are for JAX.
"""
