"""The byte planes of a store's bf16 experts, for the executor that multiplies with them (`gemv_planes`).

    plug(model, executor=registry.make("executor", "gemv_planes", planes=StorePlanes(ExpertStore(folder))))

Source: ZipMoE §3.3. Exponents are decompressed, signs and mantissas stay where they were read, and the bf16 weights are
never formed: a byte a weight less to write and read again. Each use reads the expert again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moelab.store.codecs import plane_bytes
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader, damaged


class StorePlanes:
    """(layer, expert) → parameter name → (exponents, sign-mantissa), uint8 [n] each, of `moelab.store.bits`.

    Options are those of `Reader`.

    Raises
    ------
    StoreError : when called, a tensor that cannot be decoded, and what `Reader.read` raises.
    ValueError : when called, tensors that are not bf16 or were stored without planes (codec "raw").
    """

    def __init__(self, store: ExpertStore, **options: Any) -> None:
        self.reader, self.identity, self.name = Reader(store, **options), store.identity, store.spec.name

    def __call__(self, layer: int, expert: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        chunks, found = self.reader.read(layer, expert), {}
        for name, entry in chunks.entries.items():
            if entry.dtype != "BF16" or len(entry.planes) != 2:
                raise ValueError(f"{name} of layer {layer} is {entry.dtype} in {len(entry.planes)} plane(s), and only "
                                 f"bf16 in two planes is multiplied split: convert a bf16 model with another codec "
                                 f"than 'raw', or use StoreExperts(store) as a source")
            try:
                exponents, rest = (plane_bytes(chunks.plane(name, i), entry.n) for i in range(2))
            except ValueError as error:
                raise damaged(chunks, name, error) from error
            found[name] = exponents, rest
        return found
