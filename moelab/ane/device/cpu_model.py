"""The CPU's side of the device model, each parameter read off a published figure (NPUMoE §5.3, Fig. 7, Tables 4, 6, 7).

An expert on the CPU costs its weights once a chunk and then each of its tokens, whatever the chunk. Each parameter is
determined by one figure, so there is no fit error to report; `comparison` judges what follows from them. Times are for
PhiMoE's experts, of 157.3 million weights and H = 4096, and are scaled by weights, operations or H.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moelab.ane.device.published import ATTENTION_CPU, FIGURE_7, TABLE_4, TABLE_6, TABLE_7
from moelab.ane.device.rates import Rates
from moelab.specs import Figure

#: Table 4's run: 1024 prompt tokens in 4 chunks of 256, 16 experts, top-2; graphs of the worst case, four times the
#: mean load (§1), where Core ML places them
VISITS, ROUTED, WORST_CASE = 4 * 16, 1024 * 2, 128


@dataclass(frozen=True)
class Host:
    """The CPU's parameters.

    expert, row : ms to bring an expert's weights, and ms a token of it.
    choice : ms of router, gather, padding and write-back for each choice of an expert by a token.
    dispatch : ms that a graph of one expert costs more if Core ML places it. Taken to grow with the graph's weights:
        were it the same for each graph, Qwen3-30B's naïve system would take 48 times as long as ours, not 3.9 (§5.2).
    attention : CPU attention over ANE attention.
    cpu_w, wait_w, comm_w : W of the busy CPU, of the CPU while the ANE works, of communication all the time.
    """

    expert: float
    row: float
    choice: float
    dispatch: float
    attention: float
    cpu_w: float
    wait_w: float
    comm_w: float

    @property
    def waiting(self) -> float:
        """Share of the whole CPU that is busy while the ANE works, by its power."""
        return self.wait_w / self.cpu_w

    def scaled(self, time: float, power: float) -> Host:
        """A CPU that takes `time` times as long and draws `power` times as much."""
        return replace(self, expert=self.expert * time, row=self.row * time, choice=self.choice * time,
                       dispatch=self.dispatch * time, cpu_w=self.cpu_w * power, wait_w=self.wait_w * power,
                       comm_w=self.comm_w * power)

    def figures(self) -> dict[str, Figure]:
        """Each parameter as a figure of kind "fitted", with the published figure that it was read off."""
        sources = {"expert": ("ms", "Table 4, expert FFN of CoreML (CPU)"),
                   "row": ("ms", "Fig. 7, geometric mean of 1.4x and 2.3x"),
                   "choice": ("ms", "Table 4, router, gather (twice) and padding of ours"),
                   "dispatch": ("ms", "Table 4, expert FFN of CoreML (naïve), taken as graphs of 1x128"),
                   "attention": ("ratio", "§5.3"), "cpu_w": ("W", "Tables 6 and 7, coreml"),
                   "wait_w": ("W", "Tables 6 and 7, ours"), "comm_w": ("W", "Tables 6 and 7, mean of three")}
        return {f"CPU {name}": Figure(getattr(self, name), unit, "fitted", f"NPUMoE {source}")
                for name, (unit, source) in sources.items()}


def fit_host(rates: Rates) -> Host:
    """The CPU's parameters of the M2 Ultra, given the rates of its ANE."""
    cpu_ffn, naive_ffn, _, _ = TABLE_4["expert FFN"]
    row = rates.row * (FIGURE_7[0] * FIGURE_7[1]) ** 0.5
    watts = {name: [j / TABLE_6[name][0] for j in joules] for name, joules in TABLE_7.items()}  # all, CPU, ANE, comm.
    return Host(
        expert=(cpu_ffn - ROUTED * row) / VISITS, row=row,
        # what is gathered is written back: as many rows once more
        choice=(TABLE_4["router"][3] + 2 * TABLE_4["gather"][3] + TABLE_4["padding"][3]) / ROUTED,
        dispatch=naive_ffn / VISITS - rates.graph_ms(1, WORST_CASE),
        attention=ATTENTION_CPU, cpu_w=watts["cpu"][1], wait_w=watts["npumoe"][1],
        comm_w=sum(of_system[3] for of_system in watts.values()) / len(watts))
