"""Opening models and the seam through which everything else reaches into them."""

from moelab.models.identity import identity
from moelab.models.opening import find, open_checkpoint, spec_of
from moelab.models.seam import (
    MoELayer,
    SeamExperts,
    assignments,
    discover,
    eager,
    plug,
    plugged,
    unplug,
)

__all__ = [
    "MoELayer",
    "SeamExperts",
    "assignments",
    "discover",
    "eager",
    "find",
    "identity",
    "open_checkpoint",
    "plug",
    "plugged",
    "spec_of",
    "unplug",
]
