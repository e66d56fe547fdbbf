"""What NPUMoE publishes about the Apple Neural Engine, as data: its Tables 3–9 and the ratios that its text gives.

Some of these figures the device model is fitted to (`FITTED`), the others only judge it (`JUDGED`). No figure does
both, but for Qwen3's range of TTFT and Figure 17's last step, which only decided between two forms. Nothing here was
measured by us. M2 Ultra and PhiMoE (Phi-3.5-MoE) unless said otherwise.

What does not fit together in the source:

* Table 4's column "Ours" adds up to 1707 ms, not to the 2165 ms below it.
* Its scatter and residual addition (1.2 to 1.3 s a layer, for rows that are gathered in 1 to 4 ms) would be most of
  any prefill, but Figure 14 is said to be 86 % expert FFN, and its speed-ups of 2 are impossible with them.
* Table 5's tokens are expert slots, not prompt tokens: four chunks of 16 · 32 slots at its 0.26 ms for 8x32,
  serial, are 532 ms, and Table 4 has 531 ms for just that.
* Figure 16's 2.21–5.54 belongs to chunks of 512 in §5.5 and of 1024 in §5.8; Figure 14's smallest gain at 4096 and
  1024 is 1.56 in §5.3 and 1.44 in §5.8. ANEMLL takes more energy than CPU only in §5.4, and less in Table 7.
* §5.2's ranges of Qwen3-MoE, 1.19–3.86 in time and 1.84–3.89 in energy, end where §5.3's and §5.4's end-to-end gains
  do, which go 3.86, 1.26, 1.19 and 3.89, 1.84, 1.95 over naïve, CPU and ANEMLL. Table 6 has Qwen3 at 1.99 over the CPU.
* Table 5's 1x128, parallel, takes 1.66 mJ in 0.07 ms, 23.7 W, where every other row draws 5 to 10 W.
"""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """One static configuration that was timed: G experts of capacity C in one graph, all of a layer's experts run.

    ms, mj : latency and energy of one expert slot; a layer has E·C of them. None where not given.
    mode : "serial", one graph after the other, or "parallel", all submitted at once.
    """

    G: int
    C: int
    mode: str
    ms: float
    mj: float | None = None


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
    """A published ratio, a system's figure over ours; (low, high), equal where it is one number.

    metric : "ttft", "energy", "cpu cycles" or "communication". system : a key of `moelab.ane.systems.SYSTEMS`.
    """

    model: str
    device: str
    prompt: int | None
    chunk: int | None
    metric: str
    system: str
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
