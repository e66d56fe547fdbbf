"""Other machines than GPU-NDP's, and the numbers of modules that its averages run over, for notebook
07."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.base.registry import require
from moelab.ndp.assumptions import CHOICES, Assumptions
from moelab.ndp.hardware import Hardware

#: what the text leaves open → what it could be
OPEN = CHOICES | {"averaged": ((2, 4, 6),)}  # numbers of modules
#: name → arguments of `hardware`, for drop-downs and sweeps; each is tried with 1 to 16 units
VARIANTS = {
    "paper (DDR4 modules, PCIe 5)": {},
    "PCIe 4": {"link_gbs": 31.5},
    "PCIe 6": {"link_gbs": 121.0},
    "two DDR4 channels": {"host_channels": 2},
    "faster address mapping": {"mapping": "MOP4CLXOR"},
    "LPDDR-NDP": {"unit": "lpddr-ndp"},
    "HBM-PIM": {"unit": "hbm-pim"},
}


@dataclass(frozen=True)
class Readings(Assumptions):
    """`Assumptions`, and over which numbers of modules the paper's averages run."""

    averaged: tuple[int, ...] = (2, 3, 4, 5, 6)

    def variant(self, name: str, N: int) -> Hardware:
        """Another machine, of `VARIANTS`; its units have their own clock."""
        require("machine", name, VARIANTS)
        return self.hardware(N, **({"clock_ghz": None} | VARIANTS[name]))
