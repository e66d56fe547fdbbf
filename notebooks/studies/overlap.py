"""What executing predictions can save of a token at most, on the cards of Speculating Experts and on
desktop GPUs.

Source: Speculating Experts §5.1, Eq. (1). On demand a layer computes, then copies its experts; with
the next layer's experts predicted, the shorter of the two is hidden behind the longer.

    TPOT = Σ_l (compute_l + copy_l)        ΔTPOT = Σ_l min(copy_l, compute_l)

Times are what a card's published rates allow at batch size 1: K experts over the host link; the
weights of attention, router and those experts, and the context's keys and values, once from memory.
Left out: launches and waiting (the paper's "idle"), what links and memories do not reach of their
rates, embedding and head, which no layer's copy runs beside. Models and GPUs are those of Tables 2
and 3, in bf16, at the paper's prompt lengths (§5.1.1); beside them one model on GPUs that people have,
which it did not measure. GLM-4.7-Flash is left out: the paper runs it
with another attention than its own, whose sizes it does not give. No GPU is needed, and none is
measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelab.base.arguments import several, whole
from moelab.base.records import Numbers
from moelab.base.specs import DeviceSpec, MoESpec
from moelab.cards import load_device, load_model
from moelab.offloading.budget import kv_bytes
from moelab.simulation.costs import MachineRates

#: device → the model that the paper runs on it, and the reductions of TPOT that it reports: over
#: these contexts (§5.1.3, A6000), or at most (the other two together)
PAIRS = {
    "rtx-a6000": ("Qwen3-30B-A3B", 0.09, 0.14),
    "a100-80gb": ("GPT-OSS-120B", 0.05, 0.08),
    "gh200-96gb": ("Qwen3-235B-A22B", 0.05, 0.08),
}
#: not in the paper, with the model that it runs on the smallest of its GPUs
DESKTOP = (
    "rtx-3060-12gb",
    "rtx-3090",
    "rtx-4060-ti-16gb",
    "rtx-4070-laptop-8gb",
    "rtx-4090",
    "rtx-5070-ti",
    "rtx-5080",
    "rtx-5090",
    "rtx-pro-6000",
)
CONTEXTS = (1024, 4096, 16_384, 65_536)


@dataclass(frozen=True)
class Overlap:
    """Seconds of a token whose layers are alike: of copying experts, and of all that computes."""

    copy: float
    compute: float

    @property
    def tpot(self) -> float:
        """On demand, seconds."""
        return self.copy + self.compute

    @property
    def gain(self) -> float:
        """ΔTPOT of Eq. (1), seconds."""
        return min(self.copy, self.compute)


def overlap(spec: MoESpec, device: DeviceSpec, context: int = 0) -> Overlap:
    """A token after `context` others, all experts beside the device and none kept on it (modelled).

    spec : in the dtype in which experts are copied; with ordinary attention (`kv_bytes`).

    Raises ValueError: the card has no link, or no rates."""
    rates = MachineRates.of(device, reached=0)
    experts = spec.routed_bytes
    ends = round(spec.dense_bytes) - 4 * spec.vocab * spec.H  # but for embedding and head, 16 bits
    read = experts + ends + kv_bytes(spec, context)
    return Overlap(experts / rates.read, read / rates.memory)


def run(contexts: Sequence[int] = CONTEXTS) -> dict[str, dict[str, Numbers]]:
    papers = {
        (model, device): {"reported from (paper)": least, "to (paper)": most}
        for device, (model, least, most) in PAIRS.items()
    }
    ours = {(PAIRS["rtx-a6000"][0], device): {} for device in DESKTOP}
    found: dict[str, dict[str, Numbers]] = {}
    for (model, device), reported in (papers | ours).items():
        spec = load_model(model).with_dtype("bfloat16")
        rows = found[f"{model} on {device} (modelled)"] = {}
        for context in contexts:
            one = overlap(spec, load_device(device), context)
            rows[f"context {context}"] = {
                "copy ms": 1e3 * one.copy,
                "compute ms": 1e3 * one.compute,
                "copy share": one.copy / one.tpot,
                "largest saving": one.gain / one.tpot,
            } | reported
    return found


KIND = "modelled"
MEASURES = tuple(f"moelab/cards/devices/{card}.toml" for card in (*PAIRS, *DESKTOP))
OPTIONS = {"contexts": (several(whole(1)), "tokens before the one that is decoded")}
