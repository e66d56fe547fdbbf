"""What NPUMoE publishes about the Apple Neural Engine: its tables as the ledger
(`data/claims.toml`) holds them.

Which of these numbers the device model is fitted to is said there as well, claim by claim. M2 Ultra
and PhiMoE (Phi-3.5-MoE) unless said otherwise. `inconsistencies` recomputes what does not fit
together in the source. Two more: Figure 14's smallest gain at 4096 and 1024 is 1.56 in §5.3 and
1.44 in §5.8; ANEMLL takes more energy than the CPU in §5.4, and less in Table 7."""

from __future__ import annotations

from typing import Literal, NamedTuple

from moelab.claims import ledger
from moelab.schema import Positive, Size


class Sample(NamedTuple):
    """One static configuration that was timed: G experts of capacity C in one graph, all of a
    layer's experts run."""

    G: Size
    C: Size
    mode: Literal["serial", "parallel"]  # parallel: all graphs at once
    ms: Positive  # of one expert slot, of which a layer has E·C
    mj: Positive | None = None


#: the expert that Table 5 was timed on, PhiMoE's in fp16: H, I, weights and bytes
REFERENCE_H, REFERENCE_I = 4096, 6400
REFERENCE_PARAMS = 3 * REFERENCE_H * REFERENCE_I
REFERENCE_BYTES = 2 * REFERENCE_PARAMS
#: id → value of a claim of NPUMoE's
SAID = {claim.id: claim.value for claim in ledger() if claim.source == "npumoe"}
#: systems in the order of Table 2, as ids name them
COLUMNS = {"cpu": "cpu", "naive": "naive", "anemll": "anemll", "npumoe": "ours"}
#: NPUMoE Table 5; "C=1..512" has no capacity and is left out
TABLE_5 = tuple(
    Sample(G, C, mode, SAID[f"slot{which}-{G}x{C}"], SAID[f"slot-energy{which}-{G}x{C}"])
    for G, C in (
        (1, 32),
        (1, 64),
        (1, 128),
        (4, 32),
        (4, 64),
        *((8, C) for C in (32, 64, 96, 128, 192, 256)),
    )
    for mode, which in (("parallel", "-parallel"), ("serial", ""))
)
#: a row whose energy no power of the others explains; only this very row, another machine's 1x128
#: is no outlier
OUTLIERS = frozenset(s for s in TABLE_5 if (s.G, s.C, s.mode) == (1, 128, "parallel"))

#: NPUMoE Table 4: ms of one layer, prompt of 1024 in chunks of 256, by system in the order of Table
#: 2
TABLE_4 = {
    row: tuple(SAID[f"block-{part}-{column}"] for column in COLUMNS.values())
    for row, part in (
        ("router", "router"),
        ("gather", "gather"),
        ("padding", "padding"),
        ("expert FFN", "ffn"),
        ("scatter", "scatter"),
        ("residual addition", "residual"),
        ("total", "total"),
    )
}
#: NPUMoE Table 6, Qwen3-30B: seconds of (wall, experts, attention); the prompt is not said
TABLE_6 = {
    system: tuple(SAID[f"qwen-{part}-s-{column}"] for part in ("wall", "experts", "attention"))
    for system, column in COLUMNS.items()
    if system != "naive"
}
#: NPUMoE Table 7, the same runs: joules of (all, CPU, ANE, communication)
TABLE_7 = {
    system: tuple(
        SAID[f"qwen-energy-{column}-{part}"] for part in ("all", "cpu", "ane", "communication")
    )
    for system, column in COLUMNS.items()
    if system != "naive"
}
#: NPUMoE Table 3: (dropped, padded) shares on four data sets
TABLE_3 = {
    name: (SAID[f"dropped-{key}"], SAID[f"padded-{key}"])
    for name, key in (
        ("BoolQ", "boolq"),
        ("HellaSwag", "hellaswag"),
        ("RULER niah_single_2", "single"),
        ("RULER niah_multikey_1", "multikey"),
    )
}
#: the same data sets' accuracies in per cent: of fp16, and of NPUMoE
TABLE_3_ACCURACY = {
    "BoolQ": (86.0, 86.0),
    "HellaSwag": (88.57, 87.62),
    "RULER niah_single_2": (95.5, 95.0),
    "RULER niah_multikey_1": (96.0, 96.0),
}
#: NPUMoE Figure 7, the text: matrix products take 1.4 to 2.3 times as long on the CPU as on the ANE
FIGURE_7 = SAID["fig7-least"], SAID["fig7-most"]
#: NPUMoE §5.3: attention takes about 27.6 % longer on one of ANE and CPU than on the other
ATTENTION_CPU = 1 + SAID["attention"]

#: (G, C) → published ms a slot, by mode
SLOTS = {
    mode: {(s.G, s.C): s.ms for s in TABLE_5 if s.mode == mode} for mode in ("serial", "parallel")
}
#: rows of Table 4 that its last one should be the sum of
LINES = {name: values for name, values in TABLE_4.items() if name != "total"}
OURS = 3  # column of Table 4

#: MiB of the weights of Table 5's largest groups, eight experts
EIGHT_EXPERTS = 8 * REFERENCE_BYTES / 2**20


class Inconsistency(NamedTuple):
    """A place in the paper, its statement, and what the paper's other figures say."""

    where: str
    says: str
    but: str


def expert_ffn() -> tuple[float, float]:
    """ms of Table 4's expert FFN (4 chunks, 16 experts of 32 rows, 1024 tokens) from Table 5's
    8x32, serial: as a time of an expert slot, which Table 4 confirms, and as one of a prompt token,
    which is half of it."""
    return 4 * 16 * 32 * SLOTS["serial"][8, 32], 1024 * SLOTS["serial"][8, 32]


def table_4_sums() -> list[float]:
    """What each column of Table 4 adds up to, ms."""
    return [sum(values[i] for values in LINES.values()) for i in range(4)]


def inconsistencies() -> list[Inconsistency]:
    """What the paper's figures say against each other, in words; exact arithmetic on published
    figures."""
    as_slots, as_tokens = expert_ffn()
    sums, totals = table_4_sums(), TABLE_4["total"]
    others = max(abs(ours - total) for ours, total in zip(sums[:OURS], totals))
    moved = (LINES["scatter"][OURS] + LINES["residual addition"][OURS]) / sums[OURS]
    (odd,) = OUTLIERS
    watts = [s.mj / s.ms for s in TABLE_5 if s != odd]
    single, eights = (
        " / ".join(f"{SLOTS['parallel'][G, C]:.2f}" for C in (32, 64, 128)) for G in (1, 8)
    )
    return [
        Inconsistency(
            "Table 5, “per token”",
            "ms a token",
            f"as slots, Table 4's expert FFN is {as_slots:.0f} ms, as "
            f"prompt tokens {as_tokens:.0f} ms; it says {LINES['expert FFN'][OURS]:.0f}",
        ),
        Inconsistency(
            "Table 4, column “Ours”",
            f"{totals[OURS]:.0f} ms in all",
            f"its rows add up to {sums[OURS]:.0f} ms; those of the other columns to their "
            f"totals, within {others:.2f} ms",
        ),
        Inconsistency(
            "Table 4, scatter and residual",
            f"{moved:.0%} of our MoE block",
            "Fig. 14: expert FFN is over 86 % of TTFT",
        ),
        Inconsistency(
            "Table 5, grouping",
            "larger groups lower latency (§5.7)",
            "serially, yes; in parallel 1×32, "
            f"1×64, 1×128 take {single} ms, 8×32, 8×64, 8×128 {eights}",
        ),
        Inconsistency(
            "Table 5, 1×128 parallel",
            f"{odd.mj} mJ in {odd.ms} ms",
            f"{odd.mj / odd.ms:.1f} W; all others draw {min(watts):.1f} to {max(watts):.1f}",
        ),
        Inconsistency(
            "§5.2, gains of Qwen3-MoE",
            "; ".join(
                f"{metric} {SAID[f'qwen-{metric}-least']}–{SAID[f'qwen-{metric}-most']}"
                for metric in ("ttft", "energy")
            ),
            f"the ends of §5.3's and §5.4's end-to-end gains; over the CPU those are "
            f"{SAID['end-to-end-cpu']}, Table 6's {SAID['qwen-wall-cpu']}",
        ),
        Inconsistency("§4.1, mean load", "B/E", "K·B/E (section 2)"),
        Inconsistency("§4.2, limit of a graph", "1.2 GB", f"{EIGHT_EXPERTS:g} MiB (section 3)"),
        Inconsistency("Fig. 16's 2.21x–5.54x", "chunks of 512 (§5.5)", "chunks of 1024 (§5.8)"),
    ]
