"""Which experts llama.cpp chooses, token by token: its own per-layer results, as it computes them.

    python llama_routing.py FILE.gguf '[[1025, 1026, …], …]' OUTPUT.npy

needs an interpreter with llama-cpp-python and numpy alone. llama.cpp tells a callback of each tensor
that it is going to compute and asks whether it should be seen; those named "ffn_moe_topk-LAYER" hold
the ids, [K, tokens] as views of sorted rows of all E. Each sequence is fed token by token, from an
empty context on. OUTPUT has the ids, int16 [T, L, K]."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np

CHOSEN = b"ffn_moe_topk-"


class Tensor(ctypes.Structure):
    """The head of llama.cpp's `struct ggml_tensor`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_size_t * 4),
    ]


class Listener:
    """The callback, and what it has seen: rows of `seen` are ids [K] in the order of layers."""

    def __init__(self) -> None:
        library = Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"
        self.library = ctypes.CDLL(str(library))
        self.library.ggml_get_name.restype = ctypes.c_char_p
        self.seen: list[np.ndarray] = []
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self)

    def __call__(self, at: int, ask: bool, _: object) -> bool:
        pointer = ctypes.c_void_p(at)
        if not self.library.ggml_get_name(pointer).startswith(CHOSEN):
            return not ask  # unseen, and go on
        if not ask:
            self.seen.append(self.read(pointer))
        return True

    def read(self, pointer: ctypes.c_void_p) -> np.ndarray:
        """The ids [K] of the one token that is computed."""
        K, tokens, *_ = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents.sizes
        if tokens != 1:
            raise ValueError(f"{tokens} tokens at once; one was given")
        ids = np.empty(K, np.int32)
        where = ids.ctypes.data_as(ctypes.c_void_p)
        self.library.ggml_backend_tensor_get(
            pointer, where, ctypes.c_size_t(0), ctypes.c_size_t(ids.nbytes)
        )
        return ids


def routed(file: str, sequences: list[list[int]]) -> np.ndarray:
    """The ids that llama.cpp chooses, int16 [T, L, K]."""
    listener = Listener()
    default = llama_cpp.llama_cpp.llama_context_default_params

    def listening() -> llama_cpp.llama_context_params:
        parameters = default()
        parameters.cb_eval = listener.callback
        return parameters

    llama_cpp.llama_cpp.llama_context_default_params = listening  # `Llama` has no option for it
    size = max(map(len, sequences))
    model = llama_cpp.Llama(file, n_gpu_layers=0, n_ctx=size + 64, n_batch=64, verbose=False)
    layers = int(model.metadata["qwen3moe.block_count"])
    for sequence in sequences:
        model.reset()
        for token in sequence:
            model.eval([token])
    return np.array(listener.seen, np.int16).reshape(sum(map(len, sequences)), layers, -1)


if __name__ == "__main__":
    np.save(sys.argv[3], routed(sys.argv[1], json.loads(sys.argv[2])))
    print("{}", flush=True)
    os._exit(0)  # llama.cpp may crash while it is torn down
