"""The lossless expert store: bf16 weights in byte planes, compressed to the entropy bound, decoded
at memory speed."""
