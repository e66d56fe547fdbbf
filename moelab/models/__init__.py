"""A transformers model and the seam through which everything else reaches into it."""

from moelab.models.experts import SeamExperts, assignments, eager
from moelab.models.identity import identity
from moelab.models.seam import MoELayer, discover, plug, plugged

__all__ = [
    "MoELayer",
    "SeamExperts",
    "assignments",
    "discover",
    "eager",
    "identity",
    "plug",
    "plugged",
]
