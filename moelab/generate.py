"""`python -m moelab generate [MODEL]`: text from a model, in one process or with its experts on several.

    moelab generate --prompt "the red fox" --max-new-tokens 40
    torchrun --nproc-per-node 2 -m moelab generate --parallel ep-a2a
    torchrun --nproc-per-node 4 -m moelab generate Qwen3-30B-A3B --parallel tp-ep --tp 2

Under torchrun every rank holds the model without its routed experts, and its share of those: 1/N of their bytes. The
rank reads only that share from the checkpoint. All ranks compute attention, routers and shared experts for all tokens;
the experts are computed where they are (`moelab.parallel`). Decoding is greedy; every rank takes its next token
from rank 0's scores, so ranks on different machines cannot drift apart. Only rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from moelab import datasets
from moelab.arguments import number, whole
from moelab.experts import EXECUTORS
from moelab.parallel import VARIANTS, Grid, ShardedExperts, connect, degree
from moelab.experts.quantization import Quantized
from moelab.models import discover, eager, open_checkpoint, plug
from moelab.models.opening import require_tokenizer
from moelab.registry import make

#: what a run on several ranks does if it is not told: the only way that is exact to the bit
DEFAULT = "ep-a2a"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Generation:
    """What was generated, and what it took.

    tokens : the new ones; text : decoded, None without a tokenizer.
    parallel, ranks : how the experts were spread; None and 1 in one process.
    seconds : of prefill and decoding, without opening the model.
    expert_bytes : of routed experts held, for each rank; empty in one process.
    sent : label → bytes that each rank sent to others.
    """

    prompt: str
    tokens: list[int]
    text: str | None
    parallel: str | None
    ranks: int
    seconds: float
    expert_bytes: list[int]
    sent: dict[str, list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?",
                        help="a checkpoint folder, a store or a hub id; if not given, the small model")
    parser.add_argument("--prompt", help="the text to go on from (default: a needle hidden in library text)")
    parser.add_argument("--max-new-tokens", type=whole(1), default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--parallel", choices=VARIANTS, help=f"how experts are spread over the ranks that torchrun "
                        f"started: all-gather, all-to-all-v, deduplicated, cut, both, cut along H, or tokens "
                        f"in blocks (default: {DEFAULT})")
    parser.add_argument("--tp", type=whole(1), metavar="N", help="ranks that share an expert, for tp-ep (default: 2)")
    parser.add_argument("--executor", choices=EXECUTORS, help="what computes the experts; if not given, "
                        "transformers' eager arithmetic; int8 quantises them first")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: the checkpoint's)")
    parser.add_argument("--timeout", type=number(above=0), default=600, metavar="SECONDS",
                        help="how long a rank waits for another that is silent (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(args: argparse.Namespace) -> int:
    options = {"model": args.model, "prompt": args.prompt, "max_new_tokens": args.max_new_tokens,
               "executor": args.executor, "dtype": args.dtype}
    if "RANK" in os.environ:
        with connect(args.timeout) as device:
            result = generate(**options, parallel=args.parallel or DEFAULT, tp=args.tp, device=device)
    elif args.parallel:
        raise ValueError(f"--parallel {args.parallel} needs several processes: "
                         f"torchrun --nproc-per-node 2 -m moelab generate --parallel {args.parallel} …")
    else:
        result = generate(**options)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(asdict(result), ensure_ascii=False) if args.json else _told(result))
    return 0


def generate(model: str | None = None, prompt: str | None = None, max_new_tokens: int = 32,
             parallel: str | None = None, tp: int | None = None, executor: str | None = None, dtype: str = "auto",
             device: torch.device | str | None = None) -> Generation:
    """Generate greedily; with `parallel`, every connected rank calls this and gets the same result.

    Parameters are those of the command line; see also `open_parallel`.

    Raises
    ------
    ValueError : fewer than one token, an empty prompt, a model without a tokenizer, a variant that does not fit, an
        executor that needs options or more than a rank has.
    PeerLost : another rank died.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least one token")
    prompt = datasets.prompts("needle", 1)[0].text if prompt is None else prompt
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word to go on from")
    require_tokenizer(model)
    inner = make("executor", executor) if executor else eager
    if parallel is None:
        network = open_checkpoint(model, dtype=_dtype(dtype), device=device)
        if executor:
            source = Quantized(plug(network), "int8") if executor == "int8" else None
            plug(network, executor=inner, source=source)
    elif executor == "int8":
        raise ValueError("the executor int8 quantises a whole model, in one process: leave out torchrun and --parallel")
    else:
        network = open_parallel(model, parallel, tp, inner, _dtype(dtype), device)
    inputs = network.tokenizer(prompt, return_tensors="pt").to(network.device)
    length = 0 if network.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    same = [lambda _, scores: network.grid.world.broadcast(scores, "scores")] if parallel else None

    start = time.perf_counter()
    with torch.inference_mode():
        out = network.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                               max_new_tokens=max_new_tokens, do_sample=False, logits_processor=same)
    seconds = time.perf_counter() - start
    tokens = out[0, length:].tolist()
    text = network.tokenizer.decode(tokens, skip_special_tokens=True)
    spread = _spread(network) if parallel else {"ranks": 1, "expert_bytes": [], "sent": {}}
    return Generation(prompt, tokens, text, parallel, seconds=seconds, **spread)


def open_parallel(name_or_path: str | None = None, parallel: str = DEFAULT, tp: int | None = None,
                  inner: Any = eager, dtype: Any = "auto", device: torch.device | str | None = None,
                  placements: Any = None) -> Any:
    """Open a model with this rank's share of the experts; every connected rank must call it.

    Parameters
    ----------
    name_or_path, dtype, device : see `moelab.models.open_checkpoint`.
    parallel : a key of `moelab.parallel.VARIANTS`.
    tp : ranks that share an expert: all for "tp", by default 2 for "tp-ep", 1 for the others.
    inner : the executor of what is on this rank.
    placements : which experts each ep rank holds, one for all layers or one a layer; by default consecutive ones, for
        "blocks" all.

    Returns
    -------
    The model; `.grid` are its ranks and `.shards` its share.

    Raises
    ------
    ValueError : unknown variant, or a `tp` that does not fit it or the number of ranks.
    RuntimeError : no connected ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("this process is alone; see moelab.parallel.connect and launch")
    grid = Grid(degree(parallel, dist.get_world_size(), tp))
    model = open_checkpoint(name_or_path, experts="external", dtype=dtype, device=device)
    layers, way = [layer.experts for layer in discover(model)], VARIANTS[parallel]
    if placements is None:
        placements = [way.place(experts.num_experts, grid.ep.size) for experts in layers]
    executor = way(grid, placements, inner)
    model.shards = ShardedExperts(layers, layers[0].source, placements, grid.ep.rank, grid.tp.rank, grid.tp.size,
                                  way.cut)
    model.grid = grid
    plug(model, executor=executor, source=model.shards)
    return model


def _spread(model: Any) -> dict[str, Any]:
    """What each rank holds and sent."""
    W = dist.get_world_size()
    told: list[Any] = [None] * W
    dist.all_gather_object(told, (model.shards.nbytes, {label: t.bytes for label, t in model.grid.traffic().items()}))
    labels = sorted({label for _, sent in told for label in sent})
    return {"ranks": W, "expert_bytes": [held for held, _ in told],
            "sent": {label: [sent.get(label, 0) for _, sent in told] for label in labels}}


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)


def _told(result: Generation) -> str:
    lines = [result.prompt + f"\033[1m{result.text}\033[0m" if os.isatty(1) else result.prompt + (result.text or ""),
             "", f"{len(result.tokens)} tokens in {result.seconds:.2f} s"]
    if result.parallel:
        held = ", ".join(f"{n / 1e6:,.1f}" for n in result.expert_bytes)
        sent = sum(map(sum, result.sent.values()))
        lines += [f"{result.parallel} on {result.ranks} ranks: {held} MB of experts held, {sent / 1e6:,.2f} MB sent"]
    return "\n".join(lines)
