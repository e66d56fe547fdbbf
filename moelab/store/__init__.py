"""The lossless expert store: bf16 split apart, compressed to the entropy bound, decoded at memory speed.

`bits` splits and joins weights, `huffman` is the fast coder, `codecs` the dictionary of all of them with planes
and shards, `entropy` the analysis of a checkpoint. Import the module that you need; nothing is loaded here.
"""
