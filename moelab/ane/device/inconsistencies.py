"""What NPUMoE's own tables say against each other, recomputed from them (exact arithmetic on published figures).

`moelab.ane.device.published` tells what does not fit together; here the figures that show it. The one that decides
whose
milliseconds Table 5 has: its 8x32, serial, taken as a time of an expert slot, is Table 4's expert FFN, and taken as
one of a prompt token half of it.
"""

from __future__ import annotations

from typing import NamedTuple

from moelab.ane.device.device_model import REFERENCE_BYTES
from moelab.ane.device.published import CLAIMS, END_TO_END, OUTLIERS, TABLE_4, TABLE_5, TABLE_6

#: (G, C) → published ms a slot, by mode
SLOTS = {mode: {(s.G, s.C): s.ms for s in TABLE_5 if s.mode == mode} for mode in ("serial", "parallel")}
#: rows of Table 4 that its last one should be the sum of
LINES = {name: values for name, values in TABLE_4.items() if name != "total"}
OURS = 3                                        # column of Table 4

#: MiB of the weights of PhiMoE's largest groups in Table 5, eight experts
EIGHT_EXPERTS = 8 * REFERENCE_BYTES / 2**20


class Contradiction(NamedTuple):
    where: str
    says: str
    but: str


def expert_ffn() -> tuple[float, float]:
    """ms of Table 4's expert FFN (4 chunks, 16 experts of 32 rows, 1024 tokens) from Table 5's 8x32: as a time of a
    slot, and as one of a prompt token."""
    return 4 * 16 * 32 * SLOTS["serial"][8, 32], 1024 * SLOTS["serial"][8, 32]


def table_4_sums() -> list[float]:
    """What each column of Table 4 adds up to, ms."""
    return [sum(values[i] for values in LINES.values()) for i in range(4)]


def contradictions() -> list[Contradiction]:
    """All of them, in words."""
    as_slots, as_tokens = expert_ffn()
    sums, totals = table_4_sums(), TABLE_4["total"]
    others = max(abs(ours - total) for ours, total in zip(sums[:OURS], totals))
    moved = (LINES["scatter"][OURS] + LINES["residual addition"][OURS]) / sums[OURS]
    odd, = OUTLIERS
    watts = [s.mj / s.ms for s in TABLE_5 if s != odd]
    qwen = {claim.metric: (claim.low, claim.high) for claim in CLAIMS if claim.model == "Qwen3-30B-A3B"}
    speed = END_TO_END["ttft"]
    single, eights = (" / ".join(f"{SLOTS['parallel'][G, C]:.2f}" for C in (32, 64, 128)) for G in (1, 8))
    return [
        Contradiction("Table 5, “per token”", "ms a token", f"as slots, Table 4's expert FFN is {as_slots:.0f} ms, as "
                      f"prompt tokens {as_tokens:.0f} ms; it says {LINES['expert FFN'][OURS]:.0f}"),
        Contradiction("Table 4, column “Ours”", f"{totals[OURS]:.0f} ms in all", f"its rows add up to "
                      f"{sums[OURS]:.0f} ms; those of the other columns to their totals, within {others:.2f} ms"),
        Contradiction("Table 4, scatter and residual", f"{moved:.0%} of our MoE block",
                      "Fig. 14: expert FFN is over 86 % of TTFT"),
        Contradiction("Table 5, grouping", "larger groups lower latency (§5.7)", "serially, yes; in parallel 1×32, "
                      f"1×64, 1×128 take {single} ms, 8×32, 8×64, 8×128 {eights}"),
        Contradiction("Table 5, 1×128 parallel", f"{odd.mj} mJ in {odd.ms} ms", f"{odd.mj / odd.ms:.1f} W; all others "
                      f"draw {min(watts):.1f} to {max(watts):.1f}"),
        Contradiction("§5.2, gains of Qwen3-MoE", "; ".join(f"{metric} {low}–{high}" for metric, (low, high) in
                      qwen.items()), f"the ends of §5.3's and §5.4's end-to-end gains; over the CPU those are "
                      f"{speed['cpu']}, Table 6's {TABLE_6['cpu'][0] / TABLE_6['npumoe'][0]:.2f}"),
        Contradiction("§4.1, mean load", "B/E", "K·B/E (section 2)"),
        Contradiction("§4.2, limit of a graph", "1.2 GB", f"{EIGHT_EXPERTS:g} MiB (section 3)"),
        Contradiction("Fig. 16's 2.21x–5.54x", "chunks of 512 (§5.5)", "chunks of 1024 (§5.8)")]
