"""`moelab generate [MODEL]`: text from a model, in memory, within a budget or on several processes.

    moelab generate --prompt "the red fox" --max-new-tokens 40 moelab generate Qwen3-30B-A3B
    --memory 8GB --executor fast --prefetch router torchrun --nproc-per-node 4 -m moelab generate
    Qwen3-30B-A3B --parallel tp-ep --tp 2 torchrun --nproc-per-node 8 -m moelab generate
    Qwen3-30B-A3B --parallel auto --calibration popular.safetensors

Under torchrun every rank reads and holds the model without its routed experts, and its share of
those. All ranks compute attention and shared experts for all tokens, and the experts where they are
(`moelab.parallel`). Decoding is greedy, by rank 0's choices, so that ranks cannot drift apart. Only rank 0 prints.

The reason for several ranks is memory: each holds its share of the experts. A token is slower than
in one process that has room for all: attention is computed by each rank, and each layer waits for
an exchange. torchrun gives a rank one thread unless OMP_NUM_THREADS says how many."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moelab import datasets, registry
from moelab.api import DEFAULT_POLICY, make_predictor, open_model
from moelab.arguments import number, output, whole
from moelab.calibration import Calibration
from moelab.checkpoint.opening import require_tokenizer
from moelab.fast.fast_decode import DENSE
from moelab.files import writable
from moelab.models.greedy import greedy, not_followed
from moelab.offloading.budget import memory
from moelab.offloading.metrics import told
from moelab.offloading.session import Session
from moelab.parallel import VARIANTS, connect
from moelab.parallel.opening import DEFAULT, first_ranks, open_parallel, spread

DTYPES = ("auto", "float32", "bfloat16", "float16")
#: options of `moelab.open_model` that several ranks do not take
ALONE = (
    "memory",
    "cache",
    "plan",
    "prefetch",
    "cache_aware",
    "workers",
    "dense",
    "quantize",
    "device",
    "mode",
)
#: kind → names of it that are offered here; others need what no file has
OFFERED = {
    kind: [
        name
        for name in registry.names(kind)
        if name not in ("belady", "next-token", "hybrid", "oracle")
    ]
    for kind in ("executor", "cache", "predictor", "format")
}


@dataclass(frozen=True)
class Generation:
    """What was generated, and what it took; ttft to read_bytes_per_token as in
    `moelab.offloading.metrics.Metrics`."""

    prompt: str
    tokens: list[int]  # the new ones
    text: str
    parallel: str | None  # how the experts were spread; None in one process
    ranks: int
    seconds: float  # of prefill and decoding, without opening the model
    ttft: float | None
    tpot: float | None
    hit_rate: float | None
    read_bytes_per_token: float | None
    expert_bytes: list[int]  # of routed experts, held by each rank; empty in one process
    sent: dict[str, list[int]]  # label → bytes that each rank sent to others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="a checkpoint folder, a store or a hub id (default: the small model)",
    )
    parser.add_argument(
        "--prompt", help="the text to go on from (default: a needle hidden in library text)"
    )
    parser.add_argument(
        "--max-new-tokens", type=whole(1), default=32, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="SIZE",
        help="for routed experts, the others stay on "
        "disk: 8GB, 50%%, auto (default: all in memory)",
    )
    parser.add_argument(
        "--cache",
        choices=OFFERED["cache"],
        metavar="NAME",
        help=f"with --memory, who is evicted (default: {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--plan",
        choices=["auto"],
        help="with --memory and --calibration, of a compressed store: what "
        "to keep in which state, chosen by simulation (default: whole experts)",
    )
    parser.add_argument(
        "--prefetch",
        choices=OFFERED["predictor"],
        metavar="NAME",
        help="with --memory, what predicts which experts to load ahead",
    )
    parser.add_argument(
        "--estimator", metavar="FILE", help="a trained one, for --prefetch estimator"
    )
    parser.add_argument(
        "--cache-aware",
        type=number(0),
        metavar="MARGIN",
        help="with --memory and --executor fast, "
        "lossy: experts in memory are chosen before others that lead them by less than so many logits",
    )
    parser.add_argument(
        "--workers", type=whole(1), metavar="N", help="with --memory, decode workers (default: 1)"
    )
    parser.add_argument(
        "--executor",
        choices=OFFERED["executor"],
        default="exact",
        metavar="NAME",
        help="what computes the experts (default: %(default)s)",
    )
    parser.add_argument(
        "--dense",
        choices=DENSE,
        help="with --executor fast: all other linear layers by copies "
        "of fewer bits, made when it is opened; bf12 is lossless, the others round",
    )
    parser.add_argument(
        "--quantize",
        choices=OFFERED["format"],
        metavar="FORMAT",
        help="round the experts, once, to a store in data/cache, and run that",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="of `moelab calibrate`, for executors with "
        "capacities and for --plan auto; on several ranks, experts are placed so that it loads all "
        "ranks alike (EPLB)",
    )
    parser.add_argument(
        "--parallel",
        choices=(*VARIANTS, "auto"),
        metavar="NAME",
        help=f"how experts are spread over "
        f"the ranks that torchrun started, to have memory for them, not to be faster: ep (all-gather), "
        f"ep-a2a (all-to-all-v), ep-dedup (deduplicated), tp (cut), tp-ep (both), "
        f"auto: as AWS Neuron's guide advises (default: {DEFAULT})",
    )
    parser.add_argument(
        "--spare",
        type=whole(),
        default=0,
        metavar="N",
        help="with --calibration, on several ranks: "
        "so many places more in each layer, where the busiest experts are held again",
    )
    parser.add_argument(
        "--tp",
        type=whole(1),
        metavar="N",
        help="ranks that share an expert, for tp-ep (default: 2)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where to compute: cpu, or cuda, a GPU, whose memory --memory "
        "then is for (default: cpu)",
    )
    parser.add_argument(
        "--mode",
        metavar="NAME",
        help="with --memory, how experts are read: auto, direct, buffered; "
        "pinned: for a GPU, all of them once, into the CPU's memory (default: auto)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the weights (default: the checkpoint's)"
    )
    parser.add_argument(
        "--timeout",
        type=number(above=0),
        default=600,
        metavar="SECONDS",
        help="how long a rank waits for another that is silent (default: %(default)s)",
    )
    parser.add_argument(
        "--perfetto",
        type=output,
        metavar="FILE",
        help="write what happened when as a trace for "
        "https://ui.perfetto.dev; with --memory, every read, decoding and wait",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.epilog = "\n\n".join(
        [
            parser.epilog or "",
            *(f"{kind}s:\n{registry.describe(kind, offered)}" for kind, offered in OFFERED.items()),
        ]
    )


def main(args: argparse.Namespace) -> int:
    options = {
        name: getattr(args, name)
        for name in ("model", "prompt", "max_new_tokens", "executor", "dtype", "perfetto")
    } | {"stream": not args.json}
    if (args.estimator is None) != (args.prefetch != "estimator"):
        raise ValueError(
            "--prefetch estimator and --estimator FILE need each other; moelab.speculate.train makes the "
            "file (notebook 04)"
        )
    if args.prefetch == "static" and args.calibration is None:
        raise ValueError(
            "--prefetch static needs --calibration FILE, made by `moelab calibrate MODEL FILE`"
        )
    if args.estimator is not None:
        args.prefetch = estimating(args.estimator)
    calibration = Calibration.load(args.calibration) if args.calibration else None
    if "RANK" in os.environ:
        if given := [
            f"--{name.replace('_', '-')}" for name in ALONE if getattr(args, name) is not None
        ]:
            raise ValueError(
                f"{', '.join(given)}: for one process; under torchrun each rank holds its share of the "
                f"experts as they are stored (few bits: convert the model first, and give the store)"
            )
        with connect(args.timeout) as device:
            result = generate(
                **options,
                parallel=args.parallel or DEFAULT,
                tp=args.tp,
                device=device,
                calibration=calibration,
                spare=args.spare,
            )
    elif given := " ".join(
        f"--{name} {value}"
        for name in ("parallel", "spare", "tp")
        if (value := getattr(args, name))
    ):
        raise ValueError(
            f"{given} needs several processes: torchrun --nproc-per-node 2 -m moelab generate {given} …"
        )
    else:
        result = generate(
            **options,
            calibration=calibration,
            **{name: value for name in ALONE if (value := getattr(args, name)) is not None},
        )
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(asdict(result)) if args.json else _told(result))
    return 0


def estimating(path: str) -> Callable[[Any], Any]:
    """What makes the predictor "estimator" of a model, by a file of `Estimator.save`.
    FileNotFoundError: there is none."""
    from moelab.speculate import Estimator

    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no estimator at {path}; moelab.speculate.train trains one (notebook 04)"
        )
    return lambda model: make_predictor(model, "estimator", estimator=Estimator.load(path, model))


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
    spare: int = 0,
    **opening: Any,
) -> Generation:
    """Generate greedily; with `parallel`, every connected rank calls this and gets the same result.

    parallel, tp, spare : as of `open_parallel`; of `opening`, it takes the calibration.
    stream : print the prompt and the text as it comes; only the first rank does.
    perfetto : a file to which the first rank writes its timeline (`moelab.offloading.perfetto`).
    opening : memory, cache, plan, prefetch, workers, calibration, dense, quantize, cache_aware,
        mode of `moelab.open_model`.

    Raises ValueError: no token wanted, an empty prompt, a model without a tokenizer, a variant or
    an executor that does not fit; and what `moelab.open_model` raises. PeerLost: another rank died.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least one token")
    prompt = datasets.prompts("needle", 1)[0].text if prompt is None else prompt
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word to go on from")
    require_tokenizer(model)
    if perfetto is not None:
        writable(perfetto)
    stream = stream and int(os.environ.get("RANK", 0)) == 0
    start = time.perf_counter()
    if stream:
        print(f"opening {model or 'the small model'} …", file=sys.stderr, flush=True)
    if parallel is None:
        network = open_model(model, executor=executor, dtype=dtype, device=device, **opening)
    else:
        inner = None if executor == "exact" else registry.make("executor", executor)
        network = open_parallel(
            model, parallel, tp, inner, dtype, device, opening.get("calibration"), spare
        )
        Session(network)
        parallel = network.parallel
    if stream:
        for reason in getattr(network, "reasons", ()):
            print(reason, file=sys.stderr)
        print(f"opened in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        if other := not_followed(network):
            print(
                f"decoding greedily, not by its generation_config.json's {other}", file=sys.stderr
            )
    with network:
        made = _generate(network, prompt, max_new_tokens, parallel, stream)
        if perfetto is not None and int(os.environ.get("RANK", 0)) == 0:
            network.moelab.run.to_perfetto(perfetto)
        return made


def _generate(
    network: Any, prompt: str, max_new_tokens: int, parallel: str | None, stream: bool
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
            **greedy(network),
            streamer=TextStreamer(network.tokenizer, skip_prompt=True, skip_special_tokens=True)
            if stream
            else None,
        )
    seconds = time.perf_counter() - start
    if stream and os.isatty(1):
        print("\033[0m", end="")
    tokens, found = out[0, length:].tolist(), network.moelab.metrics()
    held = spread(network) if parallel else {"ranks": 1, "expert_bytes": [], "sent": {}}
    return Generation(
        prompt,
        tokens,
        network.tokenizer.decode(tokens, skip_special_tokens=True),
        parallel,
        seconds=seconds,
        ttft=found.ttft,
        tpot=found.tpot,
        hit_rate=found.hit_rate,
        read_bytes_per_token=found.read_bytes_per_token,
        **held,
    )


def _told(result: Generation) -> str:
    lines = ["", f"{len(result.tokens)} tokens in {result.seconds:.2f} s: {told(result)}"]
    if result.parallel:
        held = ", ".join(f"{n / 1e6:,.1f}" for n in result.expert_bytes)
        sent = sum(map(sum, result.sent.values()))
        lines += [
            f"{result.parallel} on {result.ranks} ranks: {held} MB of experts held, {sent / 1e6:,.2f} MB sent"
        ]
    return "\n".join(lines)
