"""What NPUMoE publishes about the Apple Neural Engine, as data: its Tables 3–9 and the ratios that its text gives.

The device model is fitted to some of these figures (`FITTED`), the others only judge it (`JUDGED`). No figure does
both, but for Qwen3's range of TTFT and Figure 17's last step, which only decided between two forms. M2 Ultra and PhiMoE
(Phi-3.5-MoE) unless said otherwise. `inconsistencies` recomputes what does not fit together in the source. Two more:
Figure 14's smallest gain at 4096 and 1024 is 1.56 in §5.3 and 1.44 in §5.8; ANEMLL takes more energy than the CPU in
§5.4, and less in Table 7.
"""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """One static configuration that was timed: G experts of capacity C in one graph, all of a layer's experts run."""

    G: int
    C: int
    mode: str                       # "serial", or "parallel", all graphs at once
    ms: float                       # of one expert slot, of which a layer has E·C
    mj: float | None = None


#: the expert that Table 5 was timed on, PhiMoE's in fp16: H, I, weights and bytes
REFERENCE_H, REFERENCE_I = 4096, 6400
REFERENCE_PARAMS = 3 * REFERENCE_H * REFERENCE_I
REFERENCE_BYTES = 2 * REFERENCE_PARAMS
#: NPUMoE Table 5; "C=1..512" has no capacity and is left out
TABLE_5 = tuple(
    Sample(G, C, mode, *figures)
    for G, C, *both in (
        (1, 32, (0.13, 0.99), (0.31, 1.43)), (1, 64, (0.08, 0.62), (0.23, 1.17)), (1, 128, (0.07, 1.66), (0.16, 0.89)),
        (4, 32, (0.14, 1.00), (0.27, 1.22)), (4, 64, (0.10, 0.94), (0.19, 0.98)),
        (8, 32, (0.15, 0.97), (0.26, 1.16)), (8, 64, (0.11, 0.79), (0.18, 0.93)), (8, 96, (0.10, 0.85), (0.15, 0.88)),
        (8, 128, (0.10, 0.74), (0.14, 0.96)), (8, 192, (0.15, 0.96), (0.15, 0.92)),
        (8, 256, (0.16, 0.98), (0.16, 0.99)))
    for mode, figures in zip(("parallel", "serial"), both))
#: a row whose energy no power of the others explains; only this very row, another machine's 1x128 is no outlier
OUTLIERS = frozenset(s for s in TABLE_5 if (s.G, s.C, s.mode) == (1, 128, "parallel"))

#: NPUMoE Table 4: ms of one layer, prompt of 1024 in chunks of 256, by system in the order of Table 2
TABLE_4 = {"router": (1, 1, 1, 1), "gather": (3.62, 1.95, 3.73, 1.24), "padding": (0, 1.62, 0, 0.37),
           "expert FFN": (969.53, 3369.86, 983.05, 530.91), "scatter": (901.06, 896.76, 902.87, 775.52),
           "residual addition": (440.62, 435.23, 440.22, 398.34), "total": (2315.83, 4706.42, 2330.87, 2165.46)}
#: NPUMoE Table 6, Qwen3-30B: seconds of (wall, experts, attention); the prompt is not said
TABLE_6 = {"npumoe": (0.572, 0.464, 0.086), "cpu": (1.139, 0.978, 0.095), "anemll": (1.144, 0.988, 0.090)}
#: NPUMoE Table 7, the same runs: joules of (all, CPU, ANE, communication)
TABLE_7 = {"npumoe": (3.80, 1.23, 1.20, 1.37), "cpu": (12.67, 9.66, 0.00, 3.01), "anemll": (12.13, 8.87, 0.26, 2.99)}
#: NPUMoE Table 8, attention on the ANE: ms, mJ; its shape is not said
TABLE_8 = (38.27, 275.70)
#: NPUMoE Table 9, one block of attention and experts of ours: seconds, joules, watts
TABLE_9 = (1.26, 12.21, 9.61)
#: what §5.8 says of Figure 17's steps: TTFT over Ours-all, and energy over Ours-TG
FIGURE_17 = {"base": ("2.89", "3.74"), "base+T": ("–", "1.31"), "base+TG": ("1.09", "1"), "npumoe": ("1", "> 1")}
#: §5.3 and §5.4, "end-to-end": gains over each system in time and in energy
END_TO_END = {"ttft": {"naive": 3.86, "cpu": 1.26, "anemll": 1.19},
              "energy": {"naive": 3.89, "cpu": 1.84, "anemll": 1.95}}
#: NPUMoE Table 3: (dropped, padded) shares on four data sets
TABLE_3 = {"BoolQ": (0.1466, 0.3173), "HellaSwag": (0.1063, 0.3477), "RULER niah_single_2": (0.2177, 0.3749),
           "RULER niah_multikey_1": (0.2100, 0.3700)}
#: the same data sets' accuracies in per cent: of fp16, and of NPUMoE
TABLE_3_ACCURACY = {"BoolQ": (86.0, 86.0), "HellaSwag": (88.57, 87.62), "RULER niah_single_2": (95.5, 95.0),
                    "RULER niah_multikey_1": (96.0, 96.0)}
#: NPUMoE Figure 7, the text: matrix products take 1.4 to 2.3 times as long on the CPU as on the ANE
FIGURE_7 = (1.4, 2.3)
#: NPUMoE §5.3: attention takes about 27.6 % longer on one of ANE and CPU than on the other
ATTENTION_CPU = 1.276


class Claim(NamedTuple):
    """A published ratio, a system's figure over ours; (low, high), equal where it is one number."""

    model: str
    device: str
    prompt: int | None
    chunk: int | None
    metric: str                     # "ttft", "energy", "cpu cycles" or "communication"
    system: str                     # a key of `SYSTEMS`
    low: float
    high: float
    source: str


def _rows(metric: str, source: str, table: dict[tuple[int, int], dict[str, float | tuple[float, float]]]
          ) -> list[Claim]:
    return [Claim("Phi-3.5-MoE", "m2-ultra", prompt, chunk, metric, system,
                  *(value if isinstance(value, tuple) else (value, value)), source)
            for (prompt, chunk), systems in table.items() for system, value in systems.items()]


#: Figures 14–16 as the text gives them (§5.3, §5.4, §5.5)
CLAIMS = tuple(
    _rows("ttft", "Fig. 14, §5.3", {
        (1024, 256): {"cpu": 2.07, "naive": 5.55, "anemll": 1.95},
        (1024, 512): {"cpu": 1.32, "naive": 3.44, "anemll": 1.33},
        (4096, 512): {"cpu": 1.58, "naive": 3.85, "anemll": 1.50},
        (4096, 1024): {"cpu": 1.72, "naive": 3.70, "anemll": 1.56}})
    + _rows("energy", "Fig. 15, §5.4", {
        (1024, 512): {"cpu": 3.19, "naive": 7.37, "anemll": 3.43},
        (4096, 512): {"cpu": (1.81, 2.30), "naive": (4.71, 5.23), "anemll": (1.86, 2.49)},
        (4096, 1024): {"cpu": (1.81, 2.30), "naive": (4.71, 5.23), "anemll": (1.86, 2.49)}})
    + _rows("cpu cycles", "Fig. 16, §5.5", {
        (1024, 256): {"cpu": 3.78, "naive": 3.61, "anemll": 2.98},
        (1024, 512): {"cpu": 2.45, "naive": 3.20, "anemll": 1.78},
        (4096, 256): dict.fromkeys(("cpu", "naive", "anemll"), (2.09, 3.70)),
        (4096, 512): dict.fromkeys(("cpu", "naive", "anemll"), (2.21, 5.54))})
    + _rows("communication", "Fig. 15, §5.4", dict.fromkeys(((1024, 256), (4096, 1024)), {"naive": (4.44, 5.69)}))
    + [Claim("Phi-3.5-MoE", "m2-ultra", None, None, metric, system, value, value, "Fig. 17, §5.8")
       for metric, system, value in (("ttft", "base", 2.89), ("ttft", "base+TG", 1.09))]
    + [Claim(model, device, None, None, metric, "any baseline", *range_, "§5.2")
       for model, device, metric, range_ in (
           ("Phi-tiny-MoE", "m2-max", "ttft", (1.11, 1.87)), ("Phi-tiny-MoE", "m2-max", "energy", (1.70, 2.68)),
           ("Qwen3-30B-A3B", "m2-ultra", "ttft", (1.19, 3.86)), ("Qwen3-30B-A3B", "m2-ultra", "energy", (1.84, 3.89)))])
#: §5.4: our energy per prompt token in mJ, over all of PhiMoE's prompts and chunks
ENERGY_PER_TOKEN_MJ = (52.0, 137.0)

#: what the device model's parameters are fitted to, and what it is only compared with
FITTED = {
    "Table 5, latency and energy": "rates and energy of expert graphs on the ANE",
    "Table 4, expert FFN of CoreML (CPU)": "CPU time of an expert's weights",
    "Figure 7, 1.4x–2.3x (geometric mean)": "CPU time of a row",
    "Table 4, expert FFN of CoreML (naïve)": "dispatch time of a graph that Core ML places",
    "§5.2, largest TTFT gain of Qwen3-MoE": "that this time grows with a graph's weights, not its value",
    "Table 4, router, gather and padding": "time of the operators that stay on the CPU",
    "§5.3, attention 27.6 %": "CPU attention over ANE attention",
    "Table 7, and the wall times of Table 6": "power of the CPU, of the CPU while the ANE works, of communication",
    "Table 3, dropped and padded": "the assumed popularity's variation from chunk to chunk (\"typical\")",
    "Figure 17, gain of the last step": "that CPU and ANE work at once, not its value",
}
JUDGED = ("Table 4, expert FFN of ours", "Table 6, experts", "Table 8", "Figure 14 (TTFT)", "Figure 15 (energy)",
          "Figure 16 (CPU cycles)", "Figure 17 (ablation)", "Figures 8 and 14 (dispatch over 60 %)",
          "§5.2 (ranges of Phi-tiny-MoE and Qwen3-30B)", "§5.4 (52–137 mJ a token)", "Table 9")


#: (G, C) → published ms a slot, by mode
SLOTS = {mode: {(s.G, s.C): s.ms for s in TABLE_5 if s.mode == mode} for mode in ("serial", "parallel")}
#: rows of Table 4 that its last one should be the sum of
LINES = {name: values for name, values in TABLE_4.items() if name != "total"}
OURS = 3                                        # column of Table 4

#: MiB of the weights of Table 5's largest groups, eight experts
EIGHT_EXPERTS = 8 * REFERENCE_BYTES / 2**20


class Inconsistency(NamedTuple):
    """A place in the paper, its statement, and what the paper's other figures say."""

    where: str
    says: str
    but: str


def expert_ffn() -> tuple[float, float]:
    """ms of Table 4's expert FFN (4 chunks, 16 experts of 32 rows, 1024 tokens) from Table 5's 8x32, serial: as a time
    of an expert slot, which Table 4 confirms, and as one of a prompt token, which is half of it."""
    return 4 * 16 * 32 * SLOTS["serial"][8, 32], 1024 * SLOTS["serial"][8, 32]


def table_4_sums() -> list[float]:
    """What each column of Table 4 adds up to, ms."""
    return [sum(values[i] for values in LINES.values()) for i in range(4)]


def inconsistencies() -> list[Inconsistency]:
    """What the paper's figures say against each other, in words; exact arithmetic on published figures."""
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
        Inconsistency("Table 5, “per token”", "ms a token", f"as slots, Table 4's expert FFN is {as_slots:.0f} ms, as "
                      f"prompt tokens {as_tokens:.0f} ms; it says {LINES['expert FFN'][OURS]:.0f}"),
        Inconsistency("Table 4, column “Ours”", f"{totals[OURS]:.0f} ms in all", f"its rows add up to "
                      f"{sums[OURS]:.0f} ms; those of the other columns to their totals, within {others:.2f} ms"),
        Inconsistency("Table 4, scatter and residual", f"{moved:.0%} of our MoE block",
                      "Fig. 14: expert FFN is over 86 % of TTFT"),
        Inconsistency("Table 5, grouping", "larger groups lower latency (§5.7)", "serially, yes; in parallel 1×32, "
                      f"1×64, 1×128 take {single} ms, 8×32, 8×64, 8×128 {eights}"),
        Inconsistency("Table 5, 1×128 parallel", f"{odd.mj} mJ in {odd.ms} ms", f"{odd.mj / odd.ms:.1f} W; all others "
                      f"draw {min(watts):.1f} to {max(watts):.1f}"),
        Inconsistency("§5.2, gains of Qwen3-MoE", "; ".join(f"{metric} {low}–{high}" for metric, (low, high) in
                      qwen.items()), f"the ends of §5.3's and §5.4's end-to-end gains; over the CPU those are "
                      f"{speed['cpu']}, Table 6's {TABLE_6['cpu'][0] / TABLE_6['npumoe'][0]:.2f}"),
        Inconsistency("§4.1, mean load", "B/E", "K·B/E (section 2)"),
        Inconsistency("§4.2, limit of a graph", "1.2 GB", f"{EIGHT_EXPERTS:g} MiB (section 3)"),
        Inconsistency("Fig. 16's 2.21x–5.54x", "chunks of 512 (§5.5)", "chunks of 1024 (§5.8)")]
