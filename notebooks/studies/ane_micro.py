"""Single graphs on a Mac's units: NPUMoE's Figures 7 and 8, Tables 5, 8 and 9, and a device card by
which `moelab ane plan --device FILE` compares the systems on that Mac.

Units are Core ML's: the CPU alone (the paper's baseline, the same packages), CPU and Neural Engine,
CPU and GPU. CPU seconds are those of this process's threads: macOS gives no cycles without root.
Graphs have random weights; `sizes` are H and I of an expert, by default PhiMoE's, of which eight
take 1.3 GB."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from moelab.ane.coreml.ffn_graph import Expert, conv, save_ffn, save_program
from moelab.ane.coreml.package import coremltools, read_package
from moelab.ane.device.mac import Meter
from moelab.ane.predict import REFERENCE_H, REFERENCE_PARAMS, CPURates
from moelab.base.records import Numbers, Record, Records

from .ane_published import Sample
from .ane_rates import figures, fit, write_card

#: what is measured → Core ML's name of the units
UNITS = {"CPU": "CPU_ONLY", "ANE": "CPU_AND_NE", "GPU": "CPU_AND_GPU"}
SIZES = REFERENCE_H, 6400
#: of Table 5: enough to tell launch, weights, row and spill apart
GRAPHS = ((1, 32), (1, 64), (1, 128), (4, 32), (4, 64), (8, 32), (8, 64), (8, 128), (8, 192))
#: output channels of Figure 7's products, of which the text names the ends
MATRICES = (64, 1024, 4096, 14336, 32048)
#: makes what runs a package on units, called like an `Evaluator`
Load = Callable[[Path, str], Callable[[Mapping[str, Any]], Any]]


def measure(
    work: Callable[[], Any],
    repeats: int,
    meter: Meter,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], Numbers, float]:
    """(seconds of each of `repeats`, after one that does not count; mJ of one repeat by part of the
    chip, empty where they cannot be read; CPU seconds of one repeat)."""
    work()
    seconds = []
    with meter.window() as mj:
        busy = time.process_time()
        for _ in range(repeats):
            start = clock()
            work()
            seconds.append(clock() - start)
        busy = time.process_time() - busy
    return seconds, {part: value / repeats for part, value in mj.items()}, busy / repeats


def timed(work: Callable[[], Any], repeats: int, meter: Meter) -> Numbers:
    """`measure` as a row: ms, mJ in all and by part, W and CPU ms of one run."""
    seconds, mj, busy = measure(work, repeats, meter)
    row = {"ms": 1e3 * median(seconds), "CPU, ms": 1e3 * busy}
    if mj:
        row |= {"mJ": sum(mj.values()), "W": sum(mj.values()) / 1e3 / np.mean(seconds)}
    return row | {f"{part}, mJ": value for part, value in mj.items()}


def sample_inputs(path: Path) -> dict[str, np.ndarray]:
    """Normal random inputs for a package's function."""
    rng = np.random.default_rng(0)
    return {
        name: 0.25 * rng.standard_normal(value.shape, dtype=np.float32)
        for name, value in read_package(path).function.inputs.items()
    }


def of_package(path: Path, load: Load, repeats: int, meter: Meter) -> Records:
    """Unit → what a run of a package takes there."""
    inputs = sample_inputs(path)
    found = {}
    for unit, name in UNITS.items():
        run = load(path, name)
        found[unit] = timed(lambda run=run: run(inputs), repeats, meter)
    return found


def random_expert(H: int, I: int) -> Expert:
    """An expert with a gate, of small random weights."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, dtype=np.float32) / H**0.5).astype(np.float16)

    return Expert(matrix(I, H), matrix(H, I), matrix(I, H))


def matrices(folder: Path, load: Load, repeats: int, meter: Meter, sizes: Any = SIZES) -> Records:
    """Figure 7: products of 512 rows of H with [H, M], by unit."""
    found = {}
    for M in MATRICES:
        path = save_program(
            folder / f"matrix_{M}.mlpackage", product(random_expert(sizes[0], M).up)
        )
        for unit, row in of_package(path, load, repeats, meter).items():
            found[f"M = {M}, {unit}"] = row
    return found


def product(weight: np.ndarray) -> Any:
    """The program of 512 rows times a matrix [M, H]."""
    ct = coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    spec = mb.TensorSpec(shape=(1, weight.shape[1], 1, 512), dtype=types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS18)
    def program(x):
        return conv(mb, x, weight, None, "y")

    return program


def launches(folder: Path, load: Load, repeats: int, meter: Meter, sizes: Any = SIZES) -> Records:
    """Figure 8: 16 experts of 32 rows as 16 graphs, one after the other, and as graphs of 4, by the
    CPU alone and beside the Neural Engine."""
    found, expert = {}, random_expert(*sizes)
    for G in (1, 4):
        path = save_ffn(folder / f"launch_{G}.mlpackage", [expert] * G, 32)
        inputs = sample_inputs(path)
        for unit in ("CPU", "ANE"):
            run, n = load(path, UNITS[unit]), 16 // G

            def all_of_them(run: Any = run, n: int = n, inputs: Any = inputs) -> None:
                for _ in range(n):
                    run(inputs)

            found[f"{n} launches, {unit}"] = timed(all_of_them, repeats, meter)
    return found


def graphs(folder: Path, load: Load, repeats: int, meter: Meter, sizes: Any = SIZES) -> Records:
    """Table 5, serial: graphs of G experts of C rows on the Neural Engine; also 1×128 on all units,
    where Core ML places it."""
    expert, found = random_expert(*sizes), {}
    for G, C in GRAPHS:
        path = save_ffn(folder / f"graph_{G}x{C}.mlpackage", [expert] * G, C)
        inputs = sample_inputs(path)
        for unit in (UNITS["ANE"], *(("ALL",) if (G, C) == (1, 128) else ())):
            run = load(path, unit)
            name = f"{G}×{C}" + ", Core ML places" * (unit == "ALL")
            row = timed(lambda run=run, inputs=inputs: run(inputs), repeats, meter)
            found[name] = row | {"ms a row": row["ms"] / (G * C)}
    return found


def on_cpu(repeats: int, meter: Meter, sizes: Any = SIZES) -> Records:
    """An expert computed by torch on the CPU, as `moelab.ane.runtime` leaves it there; and choosing,
    gathering and scattering 256 tokens of two choices each."""
    H, I = sizes
    gate, up = (torch.randn(I, H, dtype=torch.bfloat16) for _ in range(2))
    down, found = torch.randn(H, I, dtype=torch.bfloat16), {}
    with torch.no_grad():
        for rows in (1, 16, 64):
            x = torch.randn(rows, H, dtype=torch.bfloat16)

            def expert(x: Any = x) -> Any:
                return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

            found[f"{rows} rows"] = timed(expert, repeats, meter)
        x, logits = torch.randn(256, H), torch.randn(256, 16)

        def host() -> None:
            weights, ids = logits.softmax(-1).topk(2)
            order = ids.flatten().argsort()
            tokens = order // 2
            out = torch.zeros_like(x)
            out.index_add_(0, tokens, x[tokens] * weights.flatten()[order, None])

        found["512 choices"] = timed(host, repeats, meter)
    return found


def attention_and_moe(converted: Any, load: Load, repeats: int, meter: Meter) -> dict[str, Records]:
    """Tables 8 and 9: a converted model's first attention, and with it all groups of its layer, by
    unit."""
    entry = next(
        (of for of in converted.layers if "file" in of["attention"] and of["groups"]), None
    )
    if entry is None:
        return {}
    parts = [entry["attention"], *(group for group in entry["groups"] if "file" in group)]
    paths = [converted.package(part) for part in parts]
    inputs = [sample_inputs(path) for path in paths]
    block = {}
    for unit, name in UNITS.items():
        runs = [load(path, name) for path in paths]

        def layer(runs: Any = runs) -> None:
            for run, given in zip(runs, inputs):
                run(given)

        block[unit] = timed(layer, repeats, meter)
    return {
        "attention (Table 8)": of_package(paths[0], load, repeats, meter),
        "attention and experts of a layer (Table 9)": block,
    }


def refit(
    path: Path, name: str, sections: Mapping[str, Records], attention: float, sizes: Any = SIZES
) -> Path:
    """A device card of this Mac: its Neural Engine and its CPU by what `graphs` and `on_cpu`
    measured, and its memory. RuntimeError without energies, or where noise hides the rates.

    attention : of the CPU over the Neural Engine."""
    of, cpu = sections["graphs (Table 5)"], sections["experts on the CPU"]
    if any("mJ" not in row for row in (*of.values(), *cpu.values())):
        raise RuntimeError(
            "a card says what the chip draws, and its energy cannot be read here: pip install "
            "'zeus[apple]'"
        )
    samples = [
        Sample(G, C, "serial", row["ms"] / (G * C), row["mJ"] / (G * C))
        for G, C in GRAPHS
        for row in [of[f"{G}×{C}"]]
    ]
    size = 3 * sizes[0] * sizes[1] / REFERENCE_PARAMS
    rates = fit(samples)["serial"].scaled(1 / size, 1 / size)
    few, many, host = cpu["1 rows"], cpu["64 rows"], cpu["512 choices"]
    row_ms = max(many["ms"] - few["ms"], 0.0) / 63
    ane, placed = of["8×128"], of["1×128, Core ML places"]
    watts = {part: ane.get(f"{part}, mJ", 0.0) / ane["ms"] for part in ("cpu", "dram")}
    of_cpu = CPURates(
        expert_ms=(few["ms"] - row_ms) / size,
        row_ms=row_ms / size,
        choice_ms=host["ms"] / 512 * REFERENCE_H / sizes[0],
        dispatch_ms=max(placed["ms"] - of["1×128"]["ms"], 0.0) / size,
        attention_ratio=attention,
        busy_w=many.get("cpu, mJ", 0.0) / many["ms"],
        wait_w=watts["cpu"],
        comm_w=watts["dram"],
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    found = {"memory_gb": memory} | figures(rates, of_cpu)
    if odd := [name for name, value in found.items() if value < 0]:
        raise RuntimeError(
            f"{', '.join(odd)} came out negative, so the times varied more than the graphs differ: "
            "measure again on a quiet machine, with more --repeats"
        )
    found = {name: max(value, 1e-6) for name, value in found.items()}  # 0: less than was seen
    return write_card(path, name, found, "measured", "moelab bench ane_mac, on this machine")


def sections(
    folder: Path, load: Load, repeats: int, meter: Meter, sizes: Sequence[int] = SIZES
) -> Record:
    """All sections that need no converted model; packages are written into `folder`."""
    how = folder, load, repeats, meter, sizes
    return {
        "matrix products (Fig. 7)": matrices(*how),
        "launches (Fig. 8)": launches(*how),
        "graphs (Table 5)": graphs(*how),
        "experts on the CPU": on_cpu(repeats, meter, sizes),
    }
