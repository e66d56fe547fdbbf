"""`advise`: what to do with this model on this machine in so much memory, and what it will give.

In three steps, each of which knows more than the one before:

    modelled    from a config, bytes and rates, in a second: `moelab.advice.ways`. No weights, no
                torch.
    simulated   forms × caches × prefetchers × … in a minute or two: `moelab.advice.space`, at what
                experts cost here,
                measured on a sample of them (`moelab.advice.sample`), with the model's own tokens.
    measured    the best ones for real, with `verify`: `moelab.advice.verify`. That is kept, and
                corrects what follows.

The second is taken by itself where the model's weights are here, and the machine and the text are
its own.
"""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from moelab.advice import calculator, gpu_machine
from moelab.advice.answer import Advice, conclude
from moelab.advice.assumed import assumed
from moelab.advice.gpu import OnGpu, is_gpu
from moelab.advice.machine import here, told
from moelab.advice.model import Model, find_model
from moelab.advice.question import PARTS, Question
from moelab.advice.ways import Way
from moelab.base.arguments import described
from moelab.base.files import write_text
from moelab.base.specs import DeviceSpec
from moelab.base.table import size
from moelab.cards import load_device
from moelab.offloading import budget

#: tokens of a sequence, where nobody says how many
CONTEXT = 4096
#: the device that is this machine's GPU
THIS = "cuda"


def advise(
    model: str | Path | None = None,
    memory: str | float | int = "auto",
    *,
    context: int | None = None,
    batch: int = 1,
    loss: str | float = 0.0,
    device: str | Path | DeviceSpec | None = None,
    trace: Any = None,
    calibration: str | Path | None = None,
    simulate: bool = True,
    verify: bool = False,
    host: str | int | None = None,
) -> Advice:
    """What to do with a model in so much memory; `print` it, or look at it in a notebook.

    model : a card's name (`moelab.names("model")`), a hub id, a checkpoint folder, of which
        config.json is enough, or a store; None is the small model.
    memory : bytes, "8GB" or "auto", for the whole process, KV cache and interpreter included; of a
        GPU's memory, if the device is one.
    host : of the CPU's memory, beside a GPU; None is all of it.
    context : tokens of a sequence, most of them the prompt; None is 4,096, or what the model takes.
    batch : sequences at a time.
    loss : the increase of language loss that is allowed: "1%", 0.01, or "any", measured here or
        not. A form whose loss nobody has measured is advised with "any" only; `verify` measures
        those of the best.
    device : a card's name, your own .toml or a `DeviceSpec`; "cuda", the GPU of this machine; without
        one, this machine is measured, and where it has a GPU, what that gives stands beside, with
        what is free of its own memory and `memory` of the CPU's.
    trace : the routing of your text: a file that `moelab.trace.load` reads, or a `RoutingTrace`;
        else what the model does here, or routing as `moelab.advice.assumed`.
    calibration : file of `moelab calibrate`, whose counts say how popular experts are.
    simulate : play the ways in the simulator, of a model whose weights are here, on this machine
        and its own text.
    verify : run the best ones for real, minutes; what is measured is kept.

    Raises FileNotFoundError, ValueError: a model or device that is not there or not known; more
    context than the model takes; a memory in which it does not fit; another model's trace or
    calibration; what cannot be verified."""
    text = context, batch, loss, trace, calibration, simulate
    places = [(memory, host, device, verify)]
    if device is None and gpu_machine.there():
        places = [(memory, None, None, verify), ("auto", host or memory, THIS, False)]
    answers: list[Advice] = []
    refused: list[Exception] = []
    for place in places:
        try:
            answers.append(_advise(model, *place, *text))
        except (ValueError, RuntimeError) as error:  # the latter of a GPU that has no memory left
            refused.append(error)
    if not answers:
        raise refused[0]
    answers.sort(key=lambda one: one.best.tpot)
    ways = sorted((way for one in answers for way in one.ways), key=lambda way: way.tpot)
    notes = dict.fromkeys([*(note for one in answers for note in one.notes), *map(str, refused)])
    return replace(answers[0], ways=tuple(ways), notes=tuple(notes))


def _advise(
    model: str | Path | None,
    memory: str | float | int,
    host: str | float | int | None,
    device: str | Path | DeviceSpec | None,
    verify: bool,
    context: int | None,
    batch: int,
    loss: str | float,
    trace: Any,
    calibration: str | Path | None,
    simulate: bool,
) -> Advice:
    """The same for what computes in one place: a CPU, or a GPU beside it."""
    found = find_model(model)
    ours = found.folder is not None and device is None and trace is None
    if verify and not ours:
        raise ValueError(
            "only a model whose weights are here can be verified, only on this machine and with its "
            "own text: give its folder, no device and no trace"
        )
    machine = _card_of(device, model) or here(found.folder)
    gpu = is_gpu(machine)
    if host and not gpu:
        raise ValueError(f"host is {host!r}, memory beside a GPU's: give a --device that is one")
    more = {"host": _memory_of(host or "auto", machine, "host_memory_gb")} if gpu else {}
    asked = (OnGpu if gpu else Question)(
        found,
        machine,
        _memory_of(memory, machine),
        _context_of(found, context),
        batch,
        parse_loss(loss),
        device not in (None, THIS),
        assumed(found.spec, batch, trace, calibration, found.source),
        **more,
    )
    if gpu and asked.memory > (most := 1e9 * machine["memory_gb"]):
        raise ValueError(
            f"memory is {size(asked.memory)}, of {machine.name}, which has {size(most)}; --host is of "
            "the CPU's memory"
        )
    if not ours or not (simulate or verify):
        return modelled(asked)
    from moelab.advice.simulated import simulated

    try:
        return simulated(asked, verify)
    except (RuntimeError, OSError) as error:
        return modelled(asked, f"The model could not be run here: {error}")


def modelled(asked: Question, *notes: str) -> Advice:
    """The advice by arithmetic alone."""

    def faster(best: Way) -> Way:
        return next(way for way in asked.arithmetic(faster=2) if way.form == best.form)

    busy = asked.device.figures.get("others_cores")
    ways = asked.arithmetic()
    others = [
        way
        for part in PARTS
        for way in replace(asked, memory=int(part * asked.memory)).arithmetic()
        if way not in ways
    ]
    return conclude(asked, ways, faster, others, [*notes, *told(busy.value if busy else 0)])


def _card_of(device: str | Path | DeviceSpec | None, model: str | Path | None) -> DeviceSpec | None:
    """A device's card. ValueError: it keeps all experts, and another command is for it."""
    if device == THIS:
        return gpu_machine.here()
    card = device and load_device(device)
    if card and "logical_cores_count" in card.figures:
        raise ValueError(
            f"{card.name} keeps all experts in the memory of its cores: `moelab neuron plan "
            f"{quote(str(model))} --device {device}` says how to spread them"
        )
    return card


def _memory_of(given: str | float | int, device: DeviceSpec, whole: str = "memory_gb") -> int:
    """Bytes of the process; ValueError for a share, which would be one of the experts."""
    memory = budget.parse_budget(given, 0, 0, lambda: round(device[whole] * 1e9) + budget.RESERVE)
    if not memory:
        raise ValueError(
            f"memory is {given!r}; it is that of the whole process, such as '8GB', or 'auto'"
        )
    return memory


def _context_of(model: Model, context: int | None) -> int:
    most = model.most or math.inf
    context = context or min(CONTEXT, most)
    if context > most:
        raise ValueError(
            f"{model.spec.name} takes sequences of at most {most:,} tokens "
            f"(max_position_embeddings of its config), and the context is {context:,}; give less"
        )
    return context


def parse_loss(loss: str | float) -> float:
    """A relative increase of language loss: "1%", 0.01; "any" is infinity. ValueError for anything
    else, a bare 1, too, which somebody means as 1 %."""
    text = str(loss).strip().lower()
    with suppress(ValueError):
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= value < 1 or text == "100%":
            return value
    if text == "any":
        return math.inf
    raise ValueError(
        f"loss is {loss!r}; it is by how much language loss may grow, from 0 to 100%, such as "
        "'1%' or 0.01, or 'any'"
    )


add_arguments = described(__file__)


def main(args: argparse.Namespace) -> int:
    asked = {name: of for name, of in vars(args).items() if name not in ("main", "debug", "page")}
    found = advise(**asked)
    print(found)
    if args.page:
        print(f"\nwritten to {write_text(args.page, calculator.page([found.asked]))}")
    return 0
