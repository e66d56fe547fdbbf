"""Random blocks of GGML's types."""

import numpy as np

#: type → where in a block its numbers of fp16 lie, and where its codes do
LAYOUT = {
    "Q8_0": ([0], [(2, 34)]),
    "Q4_0": ([0], [(2, 18)]),
    "Q4_1": ([0, 2], [(4, 20)]),
    "Q5_0": ([0], [(2, 22)]),
    "Q5_1": ([0, 2], [(4, 24)]),
    "MXFP4": ([], [(1, 17)]),
    "Q4_K": ([0, 2], [(16, 144)]),
    "Q5_K": ([0, 2], [(16, 176)]),
    "Q6_K": ([208], [(0, 192)]),
}


def blocks(form, shape, rng, scales=1e-2):
    """A blob of any codes, with scales of about this size, or of any bits if None."""
    blob = rng.integers(0, 256, form.nbytes(shape), dtype=np.uint8).reshape(-1, form.size)
    if scales is not None:
        for at in LAYOUT[form.name][0]:
            some = (scales * rng.standard_normal(len(blob))).astype(np.float16)
            blob[:, at : at + 2] = some.view(np.uint8).reshape(-1, 2)
        if form.name == "MXFP4":
            blob[:, 0] = rng.integers(110, 130, len(blob))
    return blob.reshape(-1)


def without_codes(form, blob):
    """The same blocks where each code is 0."""
    found = blob.reshape(-1, form.size).copy()
    for begin, end in LAYOUT[form.name][1]:
        found[:, begin:end] = 0
    return found.reshape(-1)
