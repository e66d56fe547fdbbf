"""Routing traces: which experts every token visited, recorded here or by another program.

routing_trace    `RoutingTrace`, and its files
"""

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
    "map_hidden",
]
