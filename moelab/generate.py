"""`python -m moelab generate [MODEL]`: text from a model, in memory, within a budget or on several processes.

    moelab generate --prompt "the red fox" --max-new-tokens 40
    moelab generate Qwen3-30B-A3B --memory 8GB --executor fast --prefetch router
    torchrun --nproc-per-node 4 -m moelab generate Qwen3-30B-A3B --parallel tp-ep --tp 2

Under torchrun every rank reads and holds the model without its routed experts, and its share of those. All ranks
compute attention, routers and shared experts for all tokens, and the experts where they are (`moelab.parallel`).
Decoding is greedy, from rank 0's scores, so that ranks cannot drift apart. Only rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from moelab import datasets, registry
from moelab.arguments import number, whole
from moelab.calibration import Calibration
from moelab.models import discover, eager, open_checkpoint, plug
from moelab.models.fast_decode import DENSE
from moelab.models.opening import require_tokenizer
from moelab.offloading.metrics import told
from moelab.offloading.session import Session
from moelab.opening import DEFAULT_POLICY, open_model
from moelab.parallel import VARIANTS, Grid, ShardedExperts, connect, degree

#: what a run on several ranks does if it is not told: the only way that is exact to the bit
DEFAULT = "ep-a2a"
DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHES = [name for name in registry.names("cache") if name not in ("belady", "next-token")]    # which need more


@dataclass(frozen=True)
class Generation:
    """What was generated, and what it took; ttft to read_bytes_per_token as in `moelab.offloading.metrics.Metrics`."""

    prompt: str
    tokens: list[int]               # the new ones
    text: str
    parallel: str | None            # how the experts were spread; None in one process
    ranks: int
    seconds: float                  # of prefill and decoding, without opening the model
    ttft: float | None
    tpot: float | None
    hit_rate: float | None
    read_bytes_per_token: float | None
    expert_bytes: list[int]         # of routed experts, held by each rank; empty in one process
    sent: dict[str, list[int]]      # label → bytes that each rank sent to others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a checkpoint folder, a store or a hub id (default: the small model)")
    parser.add_argument("--prompt", help="the text to go on from (default: a needle hidden in library text)")
    parser.add_argument("--max-new-tokens", type=whole(1), default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--memory", metavar="SIZE", help="for routed experts, the others stay on disk: 8GB, 50%%, auto "
                        "(default: all in memory)")
    parser.add_argument("--cache", choices=CACHES, default=DEFAULT_POLICY, metavar="NAME",
                        help="with --memory, who is evicted (default: %(default)s)")
    parser.add_argument("--plan", choices=["auto"], help="with --memory and --calibration, of a compressed store: what "
                        "to keep in which state, chosen by simulation (default: whole experts)")
    parser.add_argument("--prefetch", choices=registry.names("predictor"), metavar="NAME",
                        help="with --memory, what predicts which experts to load ahead")
    parser.add_argument("--cache-aware", type=number(0), metavar="MARGIN", help="with --memory and --executor fast, "
                        "lossy: experts in memory are chosen before others that lead them by less than so many logits")
    parser.add_argument("--workers", type=whole(1), default=1, metavar="N",
                        help="with --memory, decode workers (default: %(default)s)")
    parser.add_argument("--executor", choices=registry.names("executor"), default="exact", metavar="NAME",
                        help="what computes the experts (default: %(default)s)")
    parser.add_argument("--dense", choices=DENSE, help="with --executor fast: all other linear layers by copies "
                        "of fewer bits, made when it is opened; bf12 is lossless, the others round")
    parser.add_argument("--quantize", choices=registry.names("format"), metavar="FORMAT",
                        help="round the experts, once, to a store in data/cache, and run that")
    parser.add_argument("--calibration", metavar="FILE", help="of `moelab calibrate`, for executors with "
                        "capacities and for --plan auto")
    parser.add_argument("--parallel", choices=VARIANTS, help=f"how experts are spread over the ranks that torchrun "
                        f"started: all-gather, all-to-all-v, deduplicated, cut, both, cut along H, or tokens "
                        f"in blocks (default: {DEFAULT})")
    parser.add_argument("--tp", type=whole(1), metavar="N", help="ranks that share an expert, for tp-ep (default: 2)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: the checkpoint's)")
    parser.add_argument("--timeout", type=number(above=0), default=600, metavar="SECONDS",
                        help="how long a rank waits for another that is silent (default: %(default)s)")
    parser.add_argument("--perfetto", metavar="FILE", help="write what happened when as a trace for "
                        "https://ui.perfetto.dev; with --memory, every read, decoding and wait")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.epilog = "\n\n".join([parser.epilog or "", *map(_listed, ("executor", "cache", "predictor", "format"))])


def _listed(kind: str) -> str:
    found = registry.describe(kind)
    lines = [f"  {name:<12} {purpose}" for name, (purpose, of) in found.items() if of == "use"]
    if teaching := [f"  {name:<12} {purpose}" for name, (purpose, of) in found.items() if of == "teaching"]:
        lines += [f"{kind}s for teaching and comparison:", *teaching]
    return "\n".join([f"{kind}s:", *lines])


def main(args: argparse.Namespace) -> int:
    options = {"model": args.model, "prompt": args.prompt, "max_new_tokens": args.max_new_tokens,
               "executor": args.executor, "dtype": args.dtype, "stream": not args.json, "perfetto": args.perfetto}
    if "RANK" in os.environ:
        if args.memory is not None:
            raise ValueError("--memory is for one process; under torchrun each rank holds its share of the experts")
        if args.quantize is not None:
            raise ValueError("--quantize is for one process; convert the model first, and give the store")
        with connect(args.timeout) as device:
            result = generate(**options, parallel=args.parallel or DEFAULT, tp=args.tp, device=device)
    elif args.parallel:
        raise ValueError(f"--parallel {args.parallel} needs several processes: "
                         f"torchrun --nproc-per-node 2 -m moelab generate --parallel {args.parallel} …")
    else:
        calibration = Calibration.load(args.calibration) if args.calibration else None
        result = generate(**options, memory=args.memory, cache=args.cache, prefetch=args.prefetch,
                          workers=args.workers, calibration=calibration, dense=args.dense, quantize=args.quantize,
                          cache_aware=args.cache_aware,
                          **({"plan": args.plan} if args.plan else {}))
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(asdict(result), ensure_ascii=False) if args.json else _told(result))
    return 0


def generate(model: str | None = None, prompt: str | None = None, max_new_tokens: int = 32,
             parallel: str | None = None, tp: int | None = None, executor: str = "exact", dtype: str = "auto",
             device: torch.device | str | None = None, stream: bool = False, perfetto: str | None = None,
             **opening: Any) -> Generation:
    """Generate greedily; with `parallel`, every connected rank calls this and gets the same result.

    stream : print the prompt and the text as it comes; only the first rank does.
    perfetto : a file to which the first rank writes its timeline (`moelab.offloading.perfetto`).
    opening : memory, cache, plan, prefetch, workers, calibration, dense, quantize, cache_aware of `moelab.open_model`.

    Raises ValueError: no token wanted, an empty prompt, a model without a tokenizer, a variant or an executor that does
    not fit; and what `moelab.open_model` raises. PeerLost: another rank died.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least one token")
    prompt = datasets.prompts("needle", 1)[0].text if prompt is None else prompt
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word to go on from")
    require_tokenizer(model)
    stream = stream and int(os.environ.get("RANK", 0)) == 0
    start = time.perf_counter()
    if stream:
        print(f"opening {model or 'the small model'} …", file=sys.stderr, flush=True)
    if parallel is None:
        network = open_model(model, executor=executor, dtype=_dtype(dtype), device=device, **opening)
    elif executor == "int8":
        raise ValueError("the executor int8 quantises a whole model, in one process: leave out torchrun and --parallel")
    else:
        inner = eager if executor == "exact" else registry.make("executor", executor)
        network = open_parallel(model, parallel, tp, inner, _dtype(dtype), device)
        Session(network)
    if stream:
        print(f"opened in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    with network:
        made = _generate(network, prompt, max_new_tokens, parallel, stream)
        if perfetto is not None and int(os.environ.get("RANK", 0)) == 0:
            network.moelab.run.to_perfetto(perfetto)
        return made


def _generate(network: Any, prompt: str, max_new_tokens: int, parallel: str | None, stream: bool) -> Generation:
    from transformers import TextStreamer
    inputs = network.tokenizer(prompt, return_tensors="pt").to(network.device)
    length = 0 if network.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    same = [lambda _, scores: network.grid.world.broadcast(scores, "scores")] if parallel else None
    if stream:
        print(prompt, end="\033[1m" if os.isatty(1) else "", flush=True)
    start = time.perf_counter()
    with torch.inference_mode():
        out = network.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                               max_new_tokens=max_new_tokens, do_sample=False, logits_processor=same,
                               streamer=TextStreamer(network.tokenizer, skip_prompt=True, skip_special_tokens=True)
                               if stream else None)
    seconds = time.perf_counter() - start
    if stream and os.isatty(1):
        print("\033[0m", end="")
    tokens, found = out[0, length:].tolist(), network.moelab.metrics()
    spread = _spread(network) if parallel else {"ranks": 1, "expert_bytes": [], "sent": {}}
    return Generation(prompt, tokens, network.tokenizer.decode(tokens, skip_special_tokens=True), parallel,
                      seconds=seconds, ttft=found.ttft, tpot=found.tpot, hit_rate=found.hit_rate,
                      read_bytes_per_token=found.read_bytes_per_token, **spread)


def open_parallel(name_or_path: str | None = None, parallel: str = DEFAULT, tp: int | None = None,
                  inner: Any = eager, dtype: Any = "auto", device: torch.device | str | None = None,
                  placements: Any = None) -> Any:
    """Open a model with this rank's share of the experts, `.shards`, of the ranks `.grid`; every rank must call it.

    parallel : a key of `moelab.parallel.VARIANTS`.
    tp : ranks that share an expert: all for "tp", by default 2 for "tp-ep", 1 for the others.
    inner : the executor of what is on this rank.
    placements : which experts each ep rank holds, one for all layers or one a layer; by default consecutive ones, for
        "blocks" all.

    Raises ValueError: unknown variant, or a `tp` that does not fit it or the number of ranks. RuntimeError: no
    connected ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("this process is alone; see moelab.parallel.connect and launch")
    grid = Grid(degree(parallel, dist.get_world_size(), tp))
    model = open_checkpoint(name_or_path, experts="external", dtype=dtype, device=device)
    layers, way = [layer.experts for layer in discover(model)], VARIANTS[parallel]
    if placements is None:
        placements = [way.place(experts.num_experts, grid.ep.size) for experts in layers]
    executor = way(grid, placements, inner)
    model.grid, model.shards = grid, ShardedExperts(layers, layers[0].source, placements, grid.ep.rank, grid.tp.rank,
                                                    grid.tp.size, way.cut)
    plug(model, executor=executor, source=model.shards)
    return model


def _spread(model: Any) -> dict[str, Any]:
    W = dist.get_world_size()
    told: list[Any] = [None] * W
    dist.all_gather_object(told, (model.shards.nbytes, {label: t.bytes for label, t in model.grid.traffic().items()}))
    labels = sorted({label for _, sent in told for label in sent})
    return {"ranks": W, "expert_bytes": [held for held, _ in told],
            "sent": {label: [sent.get(label, 0) for _, sent in told] for label in labels}}


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)


def _told(result: Generation) -> str:
    lines = ["", f"{len(result.tokens)} tokens in {result.seconds:.2f} s: {told(result)}"]
    if result.parallel:
        held = ", ".join(f"{n / 1e6:,.1f}" for n in result.expert_bytes)
        sent = sum(map(sum, result.sent.values()))
        lines += [f"{result.parallel} on {result.ranks} ranks: {held} MB of experts held, {sent / 1e6:,.2f} MB sent"]
    return "\n".join(lines)
