"""The four systems that NPUMoE compares (Table 2) and the steps of its ablation (§5.8), as data.

They differ in where attention and experts run, in the shapes of the expert graphs, and in who places them. "Core ML
(naïve)" leaves placing to Core ML; that costs a dispatch per graph which the others do not pay. "Ours-all" of the
ablation is the system "npumoe".
"""

from __future__ import annotations

from dataclasses import dataclass

from moelab.ane.operators import Unit


@dataclass(frozen=True)
class System:
    """How a plan is made.

    title : the paper's name.
    attention, experts : the unit of each block.
    tiers : capacities by tier; without, all experts have the largest tier's, the "worst case" of §4.1.
    grouped : several experts a graph.
    residency : cold experts and small groups on the CPU.
    managed : the program places graphs itself; else Core ML does, by default scheduling.
    """

    title: str
    attention: Unit
    experts: Unit
    tiers: bool = False
    grouped: bool = False
    residency: bool = False
    managed: bool = True


SYSTEMS = {
    "cpu": System("Core ML (CPU only)", "cpu", "cpu"),
    "naive": System("Core ML (naïve)", "cpu", "ane", managed=False),
    "anemll": System("ANEMLL", "ane", "cpu"),
    "base": System("Ours-base", "ane", "ane"),
    "base+T": System("Ours-T", "ane", "ane", tiers=True),
    "base+TG": System("Ours-TG", "ane", "ane", tiers=True, grouped=True),
    "npumoe": System("NPUMoE (Ours-all)", "ane", "ane", tiers=True, grouped=True, residency=True),
}
TABLE_2 = ("cpu", "naive", "anemll", "npumoe")
ABLATION = ("base", "base+T", "base+TG", "npumoe")
