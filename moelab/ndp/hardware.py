"""GPU, host, PCIe and N units with compute in memory: the machine of GPU-NDP §III-A and Table I,
and variants of it.

    GPU ── link (PCIe) ── host ── unit 0 … unit N−1       a unit: memory, bandwidth inside it,
                                                          multipliers

Figures are those of device cards; no source states the address mapping (how much of a module's
internal bandwidth a stream of weights gets) and the units' clock.

Not modelled: refresh, and, unless they are asked for, what a unit's DRAM loses to the link that
reads it (`shared_dram`) and the memory channels between host and units (six modules on two channels
of 25.6 GB/s each, below the link's 63)."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.base.registry import require
from moelab.cards import load_device

GB = 1e9
#: address mappings of which the modules' card has one rank's streaming rate, fastest first
MAPPINGS = ("MOP4CLXOR", "RoBaRaCoCh", "ChRaBaRoCo")
STATED = "stated"  # no mapping: a stream gets all of the bandwidth that the source states


@dataclass(frozen=True)
class Hardware:
    """A GPU-NDP machine in bytes, bytes/s, operations/s and multiplications/s; rates that are
    reached, not peaks.

    units : N. link : GPU to host and back; one transfer at a time. unit_… : of one; its bandwidth
        is that of a stream.
    shared_dram : weights that leave a unit over the link are read from the DRAM that its own
        computing reads.
    latency : seconds of a message over the link before its first byte.
    """

    name: str
    units: int
    gpu_memory: float
    gpu_bandwidth: float
    gpu_flops: float
    link: float
    host_memory: float
    host_bandwidth: float
    host_flops: float
    unit_memory: float
    unit_bandwidth: float
    unit_macs: float
    shared_dram: bool = False
    latency: float = 0.0


def hardware(
    units: int = 6,
    unit: str = "ndp-dimm-ddr4",
    gpu: str = "rtx-5080",
    host: str = "i7-14700",
    mapping: str = "RoBaRaCoCh",
    clock_ghz: float | None = None,
    gpu_ghz: float | None = None,
    efficiency: tuple[float, float] = (0.85, 0.8),
    host_channels: int | None = None,
    gpu_gb: float | None = None,
    shared_dram: bool = False,
    link_gbs: float | None = None,
    latency_us: float = 0.0,
) -> Hardware:
    """The paper's machine (§IV-A, Table I) with N = `units`, or a change of it; None is the card's.

    unit, gpu, host : device cards, by name or path. host_channels : memory channels that the units
        share on their way to the link; None is no limit, as in the paper.
    link_gbs : the link's peak, one way: PCIe x16 of generation 4, 5, 6 has 31.5, 63.0, 121.0 GB/s.
    mapping : of `MAPPINGS`; "stated", or a card without streaming rates: all of its bandwidth.
    clock_ghz : of the unit's multipliers. gpu_ghz : of the GPU, whose arithmetic scales with it.
    efficiency : shares of bandwidths and of arithmetic that are reached (AttAcc's GPU: 0.85, 0.8).
    gpu_gb : GPU memory, 10^9 bytes. shared_dram, latency_us : see `Hardware`; the paper has neither.

    KeyError: a card lacks a figure. ValueError: no machine is like this."""
    g, h, u = load_device(gpu), load_device(host), load_device(unit)
    clock = u["clock_ghz"] if clock_ghz is None else clock_ghz
    peak = g["link_bandwidth_gbs"] if link_gbs is None else link_gbs
    require("mapping", mapping, (*MAPPINGS, STATED))
    given = (x for x in (gpu_ghz, gpu_gb, host_channels) if x is not None)
    above = units, peak, clock, *efficiency, *given
    if units != int(units) or min(above) <= 0 or max(efficiency) > 1 or latency_us < 0:
        raise ValueError(
            f"no machine has {units=}, {peak=}, {clock=}, {gpu_ghz=}, {gpu_gb=}, {host_channels=}, "
            f"{efficiency=}, {latency_us=}: units are a whole number, at least one; the link's peak, "
            "clocks, memory and channels are above 0, efficiencies above 0 and at most 1, the latency "
            "0 or more"
        )
    if host_channels and "channel_bandwidth_gbs" in u.figures:
        peak = min(peak, u["channel_bandwidth_gbs"] * min(host_channels, units))
    stream = mapping.lower() + "_gbs"  # what a stream of weights gets of a rank's bandwidth
    inside = u[stream] * u["ranks_count"] if stream in u.figures else u["memory_bandwidth_gbs"]
    rate, flops = GB * efficiency[0], 1e12 * efficiency[1]
    return Hardware(
        f"{g.name} + {units} × {u.name}, link {peak:g} GB/s",
        units,
        (gpu_gb or g["memory_gb"]) * GB,
        g["memory_bandwidth_gbs"] * rate,
        g["bf16_tflops"] * flops * (gpu_ghz / g["clock_ghz"] if gpu_ghz else 1),
        peak * rate,
        h["memory_gb"] * GB,
        h["memory_bandwidth_gbs"] * rate,
        h["fp32_tflops"] * flops,
        u["memory_gb"] * GB,
        inside * GB,
        u["multipliers_count"] * clock * 1e9,
        shared_dram,
        1e-6 * latency_us,
    )
