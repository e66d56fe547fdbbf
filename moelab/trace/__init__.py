"""Routing traces: which experts every token visited, recorded here or by another program.

routing_trace    `RoutingTrace`, and its files
statistics       hit rates, reuse, entropy, what one layer tells of the next
reading          `load`: a trace of any program, by the name of its file
arrays, vllm, sglang, megatron, route_csv    its readers, one a format; arrays are written, too
foreign          what they found, checked and made a trace
popularity       counts without order: llama.cpp's imatrix, lists of hot experts
"""

from moelab.trace.arrays import save_arrays
from moelab.trace.reading import load
from moelab.trace.routing_trace import (
    DECODE,
    FIELDS,
    HIDDEN,
    PREFILL,
    RoutingTrace,
    counted,
    growing_tensor,
    hidden_path,
    map_hidden,
)

__all__ = [
    "DECODE",
    "FIELDS",
    "HIDDEN",
    "PREFILL",
    "RoutingTrace",
    "counted",
    "growing_tensor",
    "hidden_path",
    "load",
    "map_hidden",
    "save_arrays",
]
