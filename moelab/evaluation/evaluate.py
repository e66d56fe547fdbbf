"""`python -m moelab evaluate [MODEL|STORE]`: what a way of running a model costs in accuracy.

    moelab evaluate                                                     the small model, moelab's own tasks
    moelab evaluate --modes hint:router,speculative:quasi,router-free --estimator estimator.safetensors
    moelab evaluate qwen.store --budget 50% --modes speculative:quasi --tasks loss,gsm8k,boolq --limit 100
    moelab evaluate --modes executor:capacity:factor=1.25

With executors that drop tokens every mode runs one text at a time: the texts of a batch, and its padding, would compete
for the same places.

Modes are those of Speculating Experts: `hint` runs the true experts, `speculative` the predicted ones, `router-free`
the estimator's with no router at all (§4, §5.1, §6.4); and the executors of `moelab.experts`. Every mode is compared
with the baseline in pairs. Tasks are moelab's own, which need no network, or lm-eval's by name.
"""

from __future__ import annotations

import argparse
import ast
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from moelab import datasets
from moelab.arguments import whole
from moelab.evaluation import accuracy
from moelab.files import results_root, write_json
from moelab.experts.quantization import Int8, Quantized
from moelab.models import plug, plugged

DEFAULT_PREDICTOR = "quasi"     # Router-PF, which needs no training
EXECUTOR = "executor"           # the mode that is no way of speculating
#: sources of the training split that measure what predictors are made of
CALIBRATION = ("code", "prose", "needle_multikey", "lookup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a checkpoint folder, a hub id or an expert store; if not given, the "
                                                 "small model")
    parser.add_argument("--tasks", default=",".join(accuracy.TASKS), help="moelab's own, moelab_NAME (the same under "
                        "lm-eval), or lm-eval's: humaneval, mbpp+, gsm8k, aime24, strategyqa, boolq, hellaswag, "
                        "ruler … (default: all of moelab's own)")
    parser.add_argument("--modes", default="", help="compared with the baseline: hint[:PREDICTOR], "
                        "speculative[:PREDICTOR], router-free, executor:NAME[:OPTION=VALUE]; with executors that drop "
                        "tokens all modes run one text at a time, as texts of a batch would compete")
    parser.add_argument("--limit", type=whole(2), metavar="N",
                        help="questions a task, at least two, as a standard error "
                        "needs; if not given, 200 of moelab's own and all of lm-eval's")
    parser.add_argument("--tokens", type=whole(1), default=256,
                        help="length of a prompt, in tokens of the model (%(default)s)")
    parser.add_argument("--decode-only", action="store_true", help="speculate in decode steps only, as a server would; "
                        "moelab's own tasks are then scored in decode steps")
    parser.add_argument("--budget", help="of a store: memory for experts, such as 50%% or 2GB")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--batch", type=whole(1), default=8, metavar="B", help="texts a forward pass (%(default)s); "
                        "1 where an executor drops tokens")
    parser.add_argument("--vectors", type=Path, metavar="FILE", help="default vectors, measured if not given")
    parser.add_argument("--estimator", type=Path, metavar="FILE", help="a trained estimator: estimator, hybrid and "
                                                                       "router-free need one")
    parser.add_argument("--calibration", type=whole(1), default=64, metavar="N",
                        help="prompts of the training split that "
                        "measure what a predictor needs (%(default)s)")
    parser.add_argument("--chat", action="store_true", help="lm-eval's questions in the tokenizer's chat template")
    parser.add_argument("--run-code", action="store_true", help="let tasks execute the code that the model writes, "
                        "here and without a sandbox")
    parser.add_argument("--seed", type=whole(), default=0, help="of prompts and of the random predictor")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes; if not given, "
                                                                    "results/runs/evaluate/TIME.json")


def main(args: argparse.Namespace) -> int:
    wanted = list(dict.fromkeys(name for name in args.tasks.split(",") if name))
    own = [name for name in wanted if name in accuracy.TASKS]
    foreign = [name for name in wanted if name not in accuracy.TASKS]
    pairs = [parse_mode(text) for text in args.modes.split(",") if text and text != "baseline"]
    n = 200 if args.limit is None else args.limit
    model = open_any(args.model, args.budget, args.device)
    try:
        modes: dict[str, Any] = {"baseline": nullcontext}
        parts, batch = Ingredients(model, args), args.batch
        for mode, predictor in pairs:
            if mode == EXECUTOR:
                run = executor(predictor)
                source = Quantized(plug(model), "int8") if isinstance(run, Int8) else None
                modes[f"{mode}:{predictor}"] = partial(plugged, model, run, source)
                # the tokens of a batch's texts, and its padding, would compete for the same places
                batch = batch if source or run.lossless else 1
                continue
            name = mode if mode == "router-free" else f"{mode}:{predictor}"
            modes[name] = partial(speculation, model, mode, predictor, parts.of(predictor), not args.decode_only)
        samples: accuracy.Samples = {}
        if foreign:         # first: what cannot be had is better known before hours of work than after
            from moelab.evaluation import lm_eval_adapter
            tasks = lm_eval_adapter.load(foreign, model, n=n, tokens=args.tokens, seed=args.seed,
                                         run_code=args.run_code)
            still = [task.task_name for task in tasks if task.OUTPUT_TYPE != "generate_until"]
            if args.decode_only and still:
                raise ValueError(f"{', '.join(still)} generates nothing, so --decode-only would change nothing; leave "
                                 f"it out, or choose tasks that generate")
            samples = lm_eval_adapter.compare(model, modes, tasks, limit=args.limit, batch_size=batch,
                                              chat=args.chat)
        found = accuracy.result(samples, {})
        if own:
            mine = accuracy.compare(model, modes, own, n=n, windows=max(n // 4, 4), tokens=args.tokens, seed=args.seed,
                                    decode=args.decode_only, batch_size=batch)
            found = {"kind": mine["kind"]} | {key: mine[key] | found[key]
                                              for key in ("settings", "scores", "pairs", "samples")}
    finally:
        if (offloading := getattr(model, "moelab", None)) is not None:
            offloading.close()
    print(accuracy.table(found))
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
                if key not in ("main", "debug", "output")}
    found["settings"] = settings | found["settings"] | {"model": model.spec.name, "batch": batch}
    print(f"\n{write(found, args.output)}")
    return 0


def open_any(name: str | None, budget: str | None = None, device: str = "cpu") -> Any:
    """The model of a checkpoint, of a hub id or (offloaded) of an expert store.

    Raises
    ------
    ValueError : a budget for what is no store; and what `open_model` and `offload` raise.
    """
    from moelab import open_model
    from moelab.offloading.offload import offload
    from moelab.store.layout import INDEX
    if name is not None and (Path(name).expanduser() / INDEX).is_file():
        return offload(name, budget or "auto", device=device)
    if budget is not None:
        raise ValueError(f"--budget {budget} is for an expert store, and {name or 'the small model'} is none; "
                         f"`python -m moelab convert` makes one")
    return open_model(name, device=device)


# ------------------------------------------------------------------------------------------------------------ modes

def parse_mode(text: str) -> tuple[str, str]:
    """(mode, predictor) of "hint", "speculative:hybrid", "router-free" …; of an executor, its name and options.

    Raises
    ------
    ValueError : no such mode, predictor or executor.
    """
    from moelab.speculate import MODES, PREDICTORS
    mode, _, predictor = text.partition(":")
    if mode == EXECUTOR:
        executor(predictor)                             # or it says what is wrong before anything is opened
        return mode, predictor
    if mode not in MODES:
        raise ValueError(f"there is no mode {mode!r}; there are baseline, {', '.join(MODES)}, {EXECUTOR}:NAME")
    predictor = predictor or ("estimator" if mode == "router-free" else DEFAULT_PREDICTOR)
    usable = [name for name in PREDICTORS if name != "oracle"]
    if predictor not in usable:
        raise ValueError(f"{text!r}: the predictor is {predictor!r}; it can be {', '.join(usable)}" + (
            " (an oracle must be told what these very prompts choose: see moelab.speculate.scoring)"
            if predictor == "oracle" else ""))
    if mode == "router-free" and predictor != "estimator":
        raise ValueError(f"{text!r}: without routers only the estimator can choose experts; write router-free")
    return mode, predictor


def executor(text: str) -> Any:
    """The executor of "NAME" or "NAME:option=value:…"; values are numbers, true, false or none where they look like it.

    Raises
    ------
    ValueError : no such executor, or an option that it does not take.
    """
    from moelab.registry import make
    name, *options = text.split(":")
    given = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{EXECUTOR}:{text}: {option!r} is no option; write OPTION=VALUE")
        try:
            given[key] = ast.literal_eval(value.capitalize() if value.lower() in ("true", "false", "none") else value)
        except (ValueError, SyntaxError):
            given[key] = value
    try:
        return make("executor", name, **given)
    except TypeError as error:
        raise ValueError(f"{EXECUTOR}:{text}: {error}") from None


def speculation(model: Any, mode: str, predictor: str, ingredients: dict[str, Any], prefill: bool
                ) -> AbstractContextManager:
    """The context in which a model speculates; every use has a predictor of its own."""
    from moelab.registry import make
    from moelab.speculate import Speculation
    return Speculation(model, make("predictor", predictor, model, **ingredients), mode, prefill=prefill)


class Ingredients:
    """What predictors are made of, each read or measured once, and only if a predictor needs it."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args, self.seed = model, args, args.seed

    def of(self, predictor: str) -> dict[str, Any]:
        """The ingredients of a predictor, by name."""
        from moelab.speculate import takes
        return {name: getattr(self, name) for name in takes(predictor)}

    @cached_property
    def prompts(self) -> list[datasets.Prompt]:
        n, tokens = max(1, self.args.calibration // len(CALIBRATION)), self.args.tokens
        return [prompt for source in CALIBRATION
                for prompt in datasets.prompts(source, n, tokens=tokens, seed=self.seed, split="train")]

    @cached_property
    def vectors(self) -> Any:
        from moelab.speculate import DefaultVectors, default_vectors
        if self.args.vectors is not None:
            return DefaultVectors.load(self.args.vectors, self.model)
        return default_vectors(self.model, self.prompts)

    @cached_property
    def trace(self) -> Any:
        from moelab.recording import record
        return record(self.model, self.prompts, batch_size=self.args.batch)

    @cached_property
    def estimator(self) -> Any:
        if self.args.estimator is None:
            raise ValueError("the predictors estimator and hybrid, and the mode router-free, need --estimator FILE: "
                             "moelab.speculate.training.train makes one (notebook 04)")
        from moelab.speculate.estimator import Estimator
        return Estimator.load(self.args.estimator, self.model)

    @cached_property
    def choice(self) -> Any:
        from moelab.recording import record
        from moelab.speculate.scoring import choose
        trace = record(self.model, self.prompts, hidden=True, batch_size=self.args.batch)
        return choose(trace, self.model, self.vectors, self.estimator)


def write(found: dict[str, Any], output: Path | None) -> Path:
    """Write a result atomically; returns its path, by default a new one in results/runs/evaluate/."""
    now = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}"
    return write_json(output or results_root() / "runs" / "evaluate" / f"{now}.json", found)
