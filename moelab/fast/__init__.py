"""Fused decoding of single tokens: attention, norms, routers and linear layers in kernels of our own."""
