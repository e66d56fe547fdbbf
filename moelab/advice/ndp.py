"""`moelab ndp`: a model of one's own on a GPU beside memory that computes, by the systems that
GPU-NDP compares (`moelab.ndp.systems`).

What the paper leaves open of a machine and of the systems is chosen as in
`moelab.ndp.assumptions`, and then changed, one choice at a time: each time has a band. Everything is
modelled: no such machine is here. One sequence at a time, as in the paper."""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from moelab.advice.assumed import assumed
from moelab.advice.model import find_model
from moelab.base.arguments import described
from moelab.base.files import write_json
from moelab.base.progress import progress
from moelab.base.specs import MoESpec
from moelab.base.table import text_table
from moelab.cards import load_device
from moelab.ndp.assumptions import MACHINE, READINGS, Assumptions
from moelab.ndp.costs import NotSupported
from moelab.ndp.routing import PromptRouting, counted
from moelab.ndp.simulation import Result, simulate
from moelab.ndp.systems import PAPER, SYSTEMS
from moelab.simulation.costs import BESIDE

SHOWN = (*PAPER, "NDP+TP+LB+PRE, improved")
#: sequences of drawn routing beside the one that is simulated: what is known of popularity
OTHERS = 3
OURS = "as chosen"
GPU, UNIT = "rtx-5080", "ndp-dimm-ddr4"  # the paper's
HEAD = ["system", "prompt, s", "answer, s", "both, s", "× MoE-OnDemand", "prefetched"]
#: reading → system → its result, None where the machine does not support it
Found = dict[str, dict[str, Result | None]]


def readings(gpu: str = GPU, unit: str = UNIT) -> dict[str, Assumptions]:
    """Words → what is assumed: our choice, then every other choice that these cards leave open."""
    mine = Assumptions(clock_ghz=None, gpu_gb=None)
    figures = load_device(unit).figures
    papers = gpu == GPU
    left = {"gpu_ghz": papers, "gpu_gb": papers, "mapping": "ranks_count" in figures}
    left["clock_ghz"] = figures["clock_ghz"].kind != "published"
    choices = MACHINE | READINGS | {"shared_dram": (True,)}
    changes = [(name, to) for name in choices if left.get(name, True) for to in choices[name]]
    return {OURS: mine} | {f"{n} = {to}": replace(mine, **{n: to}) for n, to in changes}


def compare(
    routing: PromptRouting, modules: int = 4, gpu: str = GPU, unit: str = UNIT, **machine: Any
) -> Found:
    """Simulate the systems by every reading, on so many modules; `machine` are other arguments of
    `moelab.ndp.hardware.hardware`."""
    found: Found = {}
    for words, of in progress(readings(gpu, unit).items(), "readings", unit="reading"):
        on = of.hardware(modules, gpu=gpu, unit=unit, **machine)
        found[words] = dict.fromkeys(SHOWN)
        for name in SHOWN:
            with suppress(NotSupported):
                found[words][name] = simulate(on, of.system(name), routing)
    return found


def band(found: Found, name: str, over: str = "") -> tuple[float, float, float] | None:
    """Seconds of a system from prompt to answer, or how many times as fast as another it is: (as
    chosen, least, most of all readings); None where that is not supported."""
    pairs = [(by[name], by[over or name]) for by in found.values()]
    every = [b.end_to_end / (a.end_to_end if over else 1) for a, b in pairs if a and b]
    return (every[0], min(every), max(every)) if all(pairs[0]) else None


def fastest(found: Found) -> Counter[str]:
    """Of the paper's systems → readings by which it is the fastest."""
    times = [{name: of.end_to_end for name in PAPER if (of := by[name])} for by in found.values()]
    return Counter(min(of, key=of.get) for of in times if of)


def routed(spec: MoESpec, args: argparse.Namespace) -> tuple[PromptRouting, str]:
    """A prompt and its answer, and who says so."""
    if args.trace:
        from moelab.trace import load

        trace = load(args.trace, args.model or find_model(None).source)
        return PromptRouting.of(trace, args.seed), f"of sequence {args.seed} in {args.trace}"
    known = assumed(spec, calibration=args.calibration)
    length = args.prompt + args.answer
    ids = known.draw(spec.L, [length] * (1 + OTHERS), args.seed)
    history = counted(ids[length:], spec.E).astype(float)
    return PromptRouting(spec, ids[: args.prompt], ids[args.prompt : length], history), known.words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    described(__file__, "others")(parser)
    described(__file__, "routing")(parser.add_mutually_exclusive_group())


def main(args: argparse.Namespace) -> int:
    spec = find_model(args.model).spec
    routing, words = routed(spec, args)
    cards = {"gpu": args.gpu, "unit": args.dimm, "host": args.host}
    machine = cards | {"link_gbs": args.link}
    on = Assumptions().hardware(args.modules, **machine)
    found = compare(routing, args.modules, **machine)
    if not any(found[OURS].values()):  # say why
        simulate(on, SYSTEMS["NDP+TP"], routing)
    about = {
        "model": spec.name,
        "machine": on.name,
        "prompt": len(routing.prefill),
        "answer": len(routing.decode),
        "routing": words,
        "not published": [
            f"{card}, {figure}: {of.value:g} {of.unit}, {of.kind}: {of.source}"
            for card in cards.values()
            for figure, of in load_device(card).figures.items()
            if of.kind != "published" and figure not in BESIDE  # which the systems do not ask for
        ],
    }
    print("{model} on {machine}: prompt of {prompt}, answer of {answer} tokens".format(**about))
    print(f"Routing {words}. Modelled: as chosen (least to most of {len(found)} readings)\n")
    print(text_table(HEAD, [_row(found, system) for system in SHOWN]))
    first = ", ".join(f"{system} by {n} readings" for system, n in fastest(found).items())
    print(f"\nFastest of the paper's: {first}.")
    print("\n  ".join(["Of the cards, not published:", *about["not published"]]))
    if args.output:
        kept = {w: {n: r and asdict(r) for n, r in by.items()} for w, by in found.items()}
        form = {"schema": "moelab.ndp/1", "kind": "modelled", "unit": "s"}
        print(write_json(args.output, form | about | {"readings": kept}))
    return 0


def _row(found: Found, name: str) -> list[str]:
    if (own := found[OURS][name]) is None:
        return [name, "not supported", *[""] * 4]
    bands = band(found, name), band(found, name, "MoE-OnDemand")
    spans = [f"{of[0]:.3g} ({of[1]:.3g} to {of[2]:.3g})" if of else "–" for of in bands]
    return [name, f"{own.prefill:.3g}", f"{own.decode:.3g}", *spans, str(own.prefetched)]
