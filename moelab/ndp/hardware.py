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
    """The paper's machine (§IV-A, Table I) with N = `units`; every argument is one way to change
    it, None is what the card says.

    unit, gpu, host : device cards, by name or by the path of your own.
    link_gbs : the link's peak, one way, GB/s: PCIe x16 of generation 4, 5, 6 has 31.5, 63.0, 121.0.
    latency_us : of each message over the link; the paper has none.
    mapping : of `MAPPINGS`, or "stated"; without a streaming rate of a rank units give their whole
        internal bandwidth.
    clock_ghz : of the unit's multipliers. gpu_ghz : of the GPU, whose arithmetic scales with it.
    efficiency : share of their bandwidths that GPU memory, link and host memory reach, and of their
        arithmetic that GPU and CPU reach (AttAcc's simulator, for its GPU: 0.85, 0.8).
    host_channels : memory channels that the units share on their way to the link; None is no limit,
        as in the paper.
    gpu_gb : GPU memory, 10^9 bytes. shared_dram : see `Hardware`; the paper does not share it.

    KeyError: a card lacks a figure. ValueError: no machine is like this.
    """
    g, h, u = load_device(gpu), load_device(host), load_device(unit)
    clock = u["clock_ghz"] if clock_ghz is None else clock_ghz
    peak = g["link_bandwidth_gbs"] if link_gbs is None else link_gbs
    fine = units == int(units) >= 1 and mapping in (*MAPPINGS, STATED) and latency_us >= 0
    fine &= all(0 < share <= 1 for share in efficiency)
    given = clock, peak, *(x for x in (gpu_ghz, host_channels, gpu_gb) if x is not None)
    if not fine or min(given) <= 0:
        raise ValueError(
            f"no machine has units={units}, link_gbs={peak:g}, mapping={mapping!r}, clock_ghz={clock}, "
            f"gpu_ghz={gpu_ghz}, gpu_gb={gpu_gb}, efficiency={efficiency}, "
            f"host_channels={host_channels} and latency_us={latency_us}: units are a whole number, at "
            f"least one; the mapping is one of {', '.join((*MAPPINGS, STATED))}; efficiencies are above "
            "0 and at most 1, the latency 0 or more, all else above 0"
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
