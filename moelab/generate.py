"""`moelab generate [MODEL]`: text from a model, in memory, within a budget or on several processes.

    moelab generate --prompt "the red fox" --max-new-tokens 40
    moelab generate Qwen3-30B-A3B --memory 8GB --executor fast --prefetch router
    moelab generate Qwen3-30B-A3B --ane FOLDER --prompt-file question.txt
    torchrun --nproc-per-node 4 -m moelab generate Qwen3-30B-A3B --tp 2
    torchrun --nproc-per-node 8 -m moelab generate Qwen3-30B-A3B --parallel auto

Under torchrun every rank reads and holds the model without its routed experts, and its share of
those; with --tp, only its heads of attention and its part of shared experts, too
(`moelab.parallel`). Decoding is greedy, by rank 0's choices, so that ranks cannot drift apart. Only
rank 0 prints.

The reason for several ranks is memory: each holds its share of the experts. A token is slower than
in one process that has room for all: each layer waits for an exchange, and without --tp attention is
computed by each rank. torchrun gives a rank one thread unless OMP_NUM_THREADS says how many."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moelab.api import OPTIONS, OpenOptions, open_model
from moelab.base import registry
from moelab.base.arguments import argument, described, whole
from moelab.base.files import writable
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.opening import require_tokenizer
from moelab.evaluation.questions import prompts
from moelab.models.greedy import greedy, not_followed
from moelab.offloading.metrics import Metrics, summary_line
from moelab.offloading.session import Session
from moelab.parallel import VARIANTS, connect
from moelab.parallel.opening import first_ranks, open_parallel, spread, variant_of

#: options of `moelab.open_model` that the command has, those of them that several ranks take, too
OPENING = {name: of for name, of in OPTIONS.items() if of.keys() - {"purpose", "needs"}}
SHARED = ("executor", "dtype")
#: further options of `generate` that the command has
GENERATING = ("model", "prompt", "max_new_tokens", "drafts", "perfetto")
#: how experts may be spread over ranks
PARALLEL = (*VARIANTS, "auto")
#: a registered name that is not offered, since it needs the future
NOT_OFFERED = ("belady",)


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation(Metrics):
    """What was generated, and what it took."""

    prompt: str
    tokens: list[int]  # the new ones
    text: str
    parallel: str | None  # how the experts were spread; None in one process
    ranks: int
    seconds: float  # of prefill and decoding, without opening the model
    ane: str | None  # what ran the prompt's graphs
    drop_rate: float | None  # share of a prompt's choices of experts that these had no room for
    expert_bytes: list[int]  # of routed experts, held by each rank; empty in one process
    other_bytes: list[int]  # of all other weights
    sent: dict[str, list[int]]  # label → bytes that each rank sent to others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    described(__file__, "text")(parser.add_mutually_exclusive_group())
    described(__file__, "generate")(parser)
    add_opening(parser, 32)
    described(__file__, "ranks")(parser)


def text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read as text: {error}") from None


def drafts_of(text: str) -> int | str:
    """Reads a number of drafts, or "auto"."""
    return text if text == "auto" else whole(0)(text)


def add_opening(parser: argparse.ArgumentParser, tokens: int) -> None:
    """The model, how many tokens it generates, the options of `open_model`, and what their names are
    for at the end of --help."""
    described(__file__, "opening")(parser)
    parser.set_defaults(max_new_tokens=tokens)
    kinds = {}
    for name, of in OPENING.items():
        flag, default = dict(of), getattr(OpenOptions, name)
        purpose, needs = flag.pop("purpose"), flag.pop("needs", "")
        if kind := flag.pop("names", None):
            offered = [known for known in registry.names(kind) if known not in NOT_OFFERED]
            flag |= {"choices": [*offered, *flag.pop("also", ())], "metavar": "NAME"}
            kinds[kind] = f"{kind}s:\n{registry.describe(kind, offered)}"
        if needs:
            purpose = f"with --{needs}, {purpose}"
        if default is not None:
            purpose += f" (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=purpose, **argument(flag))
    parser.epilog = "\n\n".join([parser.epilog or "", *kinds.values()])


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of these arguments that were given."""
    return {name: of for name in names if (of := getattr(args, name)) is not None}


def main(args: argparse.Namespace) -> int:
    options = given(args, *GENERATING, *OPENING)
    shared = "RANK" in os.environ
    if not shared and (args.parallel or args.tp or args.sequence_router):
        raise ValueError(
            "--parallel, --tp and --sequence-router need several processes: torchrun --nproc-per-node 2 -m moelab "
            "generate --parallel auto …"
        )
    alone = [of for of in (*OPENING, "drafts") if of in options and of not in SHARED]
    if shared and alone:
        raise ValueError(
            f"--{', --'.join(alone).replace('_', '-')}: for one process; under torchrun each rank "
            "holds its share of the experts as they are stored (few bits: convert the model first, "
            "and give the store)"
        )
    with connect() if shared else nullcontext() as device:
        if shared:
            parallel = args.parallel or variant_of(args.tp)
            options |= {"parallel": parallel, "tp": args.tp, "device": device}
            options["sequence_router"] = args.sequence_router
        result = generate(**options, stream=not args.json)
    if is_first():
        print(json.dumps(asdict(result)) if args.json else _told(result))
    return 0


def is_first() -> bool:
    """Whether this process prints: the only one, or rank 0."""
    return int(os.environ.get("RANK", 0)) == 0


def generate(
    model: str | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 32,
    parallel: str | None = None,
    tp: int | None = None,
    executor: str = "exact",
    dtype: str = "auto",
    device: torch.device | str | None = None,
    stream: bool = False,
    perfetto: str | None = None,
    drafts: int | str = 0,
    sequence_router: bool = False,
    **opening: Any,
) -> Generation:
    """Generate greedily; with `parallel`, every connected rank calls this and gets the same result.

    parallel, tp, sequence_router : as of `open_parallel`, which takes none of `opening`.
    stream : print the prompt and the text as it comes; only the first rank does.
    perfetto : a file to which the first rank writes its timeline (`moelab.offloading.perfetto`).
    drafts : of each forward pass, as of the model's `generate`; in one process.
    opening : further options of `moelab.open_model`.

    Raises ValueError: an empty prompt, a model without a tokenizer, a variant or
    an executor that does not fit; and what `moelab.open_model` raises. PeerLost: another rank died.
    """
    prompt = prompts("needle", 1)[0].text if prompt is None else prompt
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word to go on from")
    checkpoint = Checkpoint.at(model)
    require_tokenizer(checkpoint)
    if perfetto is not None:
        writable(perfetto)
    stream = stream and is_first()
    start = time.perf_counter()
    if stream:
        print(f"opening {model or 'the small model'} …", file=sys.stderr, flush=True)
    if parallel is None:
        network = open_model(checkpoint, executor=executor, dtype=dtype, device=device, **opening)
    else:
        inner = None if executor == "exact" else registry.make("executor", executor)
        network = open_parallel(
            checkpoint, parallel, tp, inner, dtype, device, sequence_router=sequence_router
        )
        Session(network)
        parallel = network.parallel
    if stream:
        print(f"opened in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        for note in notes(network):
            print(note, file=sys.stderr)
    with network:
        made = _generate(network, prompt, max_new_tokens, parallel, stream, drafts)
        if perfetto is not None and is_first():
            network.moelab.run.to_perfetto(perfetto)
        return made


def notes(network: Any) -> Iterator[str]:
    """What to know of an opened model before its text."""
    session = network.moelab
    yield from getattr(network, "reasons", ())
    if session.planned is not None:
        yield f"prompts run by {session.planned.backend.name}"
    if other := not_followed(network):
        yield f"decoding greedily, not by its generation_config.json's {other}"
    if session.speculation is not None and session.speculation.mode != "hint":
        yield "executing predictions, so the text may differ: `moelab evaluate` says what that costs"


def _generate(
    network: Any,
    prompt: str,
    max_new_tokens: int,
    parallel: str | None,
    stream: bool,
    drafts: int | str,
) -> Generation:
    from transformers import TextStreamer

    inputs = network.tokenizer(prompt, return_tensors="pt").to(network.device)
    length = 0 if network.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    same = [lambda _, scores: first_ranks(scores, network.grid.world)] if parallel else None
    if stream:
        print(prompt, end="\033[1m" if os.isatty(1) else "", flush=True)
    start = time.perf_counter()
    with torch.inference_mode():
        out = network.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            logits_processor=same,
            drafts=drafts,
            **greedy(network),
            streamer=TextStreamer(network.tokenizer, skip_prompt=True, skip_special_tokens=True)
            if stream
            else None,
        )
    seconds = time.perf_counter() - start
    if stream and os.isatty(1):
        print("\033[0m", end="")
    tokens, found = out[0, length:].tolist(), network.moelab.metrics()
    held = spread(network) if parallel else dict(ranks=1, expert_bytes=[], other_bytes=[], sent={})
    planned = network.moelab.planned
    return Generation(
        **vars(found),
        prompt=prompt,
        tokens=tokens,
        text=network.tokenizer.decode(tokens, skip_special_tokens=True),
        parallel=parallel,
        seconds=seconds,
        ane=None if planned is None else planned.backend.name,
        drop_rate=None if planned is None else planned.total.drop_rate,
        **held,
    )


def _told(result: Generation) -> str:
    lines = ["", f"{len(result.tokens)} tokens in {result.seconds:.2f} s: {summary_line(result)}"]
    if result.ane:
        split = result.ttft_split.items()
        took = ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in split if seconds >= 5e-4)
        lines.append(
            f"the prompt, by {result.ane}: {result.launches or 0} launches, {result.drop_rate:.1%} of "
            f"the choices dropped, {result.cpu_seconds:.2f} s of CPU; {took}"
        )
        lines += [f"{mj / 1e3:.2f} J of {part}" for part, mj in (result.energy or {}).items()]
    if result.parallel:
        held, others = (
            ", ".join(f"{n / 1e6:,.1f}" for n in of)
            for of in (result.expert_bytes, result.other_bytes)
        )
        sent = sum(map(sum, result.sent.values())) / 1e6
        where = f"{result.parallel} on {result.ranks} ranks"
        lines.append(
            f"{where}: {held} MB of experts and {others} MB of other weights held, {sent:,.2f} MB sent"
        )
    return "\n".join(lines)
