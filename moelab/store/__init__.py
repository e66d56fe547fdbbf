"""Expert stores: how experts lie on the disk, and how they get there and back.

    headers            safetensors files: what is in them, checked
    codec              `Codec`, what all ways to keep a tensor have in common; `RAW`
    bits               bf16 weights ↔ exponents and sign-mantissa bytes
    bf12, huffman      lossless codecs: twelve bits in place; a code of variable length, decoded first
    fewbit, packings   few bits a weight: int8, fp8, mxfp4, int4; those of compressed-tensors, GPTQ, AWQ
    packed             a tensor that looks like the weight, over a blob
    codecs             the lossless codecs by name; byte planes and shards; a tensor ↔ its planes
    layout             a store's files and index; `ExpertStore`, and `ExpertFiles`, what a reader needs
    reader             an expert's chunks from the disk, and its tensors from them, at once or in two steps
    writer             an expert after another; resumed where it was cut off
    verify, inspect    commands
    *_triton           the same on a GPU

A new codec is a subclass of `Codec` and a line in `codecs.CODECS` with an object of it, or in
`fewbit.FORMATS` if it rounds: `compress` and `decompress` for byte planes, and for one that is computed from as it lies
`in_place`, `admits`, `kernel` and `row`, too. Commands, tests and stores know it by its name.
"""
