"""Islands whose training loop is a PyTorch script. Nothing here imports JAX."""
