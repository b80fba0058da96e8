"""Weights in and out: safetensors files, `export` and `generate`."""
