"""`moelab evaluate [MODEL|STORE]`: accuracy of running a model in several modes, each against the
baseline.

    moelab evaluate
    the small model, moelab's own tasks
    moelab evaluate --modes hint:router,speculative:quasi,router-free --estimator
    estimator.safetensors moelab evaluate qwen.store --memory 50% --modes speculative:quasi --tasks
    loss,gsm8k,boolq --limit 100 moelab evaluate --modes executor:capacity:factor=1.25
    moelab evaluate --memory 50% --decode-only --modes executor:fast,cache-aware:0.5

Modes are the registry's executors, and those of Speculating Experts: `hint` runs the true experts,
`speculative` the predicted ones, `router-free` the estimator's without a router (§4, §5.1, §6.4).
`cache-aware:MARGIN` computes `fast`, in decode steps with experts in memory before others that lead
them by less (`moelab.offloading.cache_aware`). With an executor that drops tokens every mode runs
at batch size 1, as the texts of a batch, and its padding, would compete for the same capacity."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import moelab
from moelab import registry
from moelab.api import make_executor
from moelab.arguments import output, whole
from moelab.evaluation import accuracy, questions
from moelab.evaluation.calibrate import SOURCES
from moelab.files import results_root, writable, write_json
from moelab.library import token_count
from moelab.offloading.budget import memory
from moelab.offloading.cache_aware import require_margin
from moelab.records import Record
from moelab.store.layout import INDEX

DEFAULT_PREDICTOR = "quasi"  # Router-PF, which needs no training
EXECUTOR, CACHE_AWARE = "executor", "cache-aware"  # the modes that are no ways of speculating


#: option → arguments of `add_argument`
OPTIONS: Record = {
    "model": {
        "nargs": "?",
        "help": "a checkpoint folder, a hub id or a store; else the small model",
    },
    "--tasks": {
        "default": ",".join(accuracy.TASKS),
        "help": "moelab's own, moelab_NAME (the same under "
        "lm-eval), or lm-eval's: humaneval, mbpp+, gsm8k, aime24, strategyqa, boolq, hellaswag, "
        "ruler … (default: all of moelab's own)",
    },
    "--modes": {
        "default": "",
        "help": "compared with the baseline: hint[:PREDICTOR], "
        "speculative[:PREDICTOR], router-free, executor:NAME[:OPTION=VALUE], cache-aware:MARGIN",
    },
    "--limit": {
        "type": whole(2),
        "metavar": "N",
        "help": "questions a task, at least two for a standard "
        "error; if not given, 200 of moelab's own and all of lm-eval's",
    },
    "--tokens": {"type": whole(1), "default": 256, "help": "length of a prompt (%(default)s)"},
    "--decode-only": {
        "action": "store_true",
        "help": "speculate in decode steps only, as a server would; "
        "moelab's own tasks are then scored in decode steps",
    },
    "--memory": {
        "type": memory,
        "help": "for experts, such as 50%% or 2GB, the others stay "
        "on disk; of a store, what this machine has left if not given",
    },
    "--device": {"default": "cpu", "help": "(default: %(default)s)"},
    "--batch": {
        "type": whole(1),
        "default": 8,
        "metavar": "B",
        "help": "texts a forward pass (%(default)s); 1 where an executor drops tokens",
    },
    "--estimator": {
        "type": Path,
        "metavar": "FILE",
        "help": "a trained one: estimator, hybrid and router-free need it",
    },
    "--calibration": {
        "type": whole(1),
        "default": 64,
        "metavar": "N",
        "help": "prompts of the training split that measure what a predictor needs (%(default)s)",
    },
    "--chat": {
        "action": "store_true",
        "help": "lm-eval's questions in the tokenizer's chat template",
    },
    "--run-code": {
        "action": "store_true",
        "help": "let tasks execute the code that the model writes, here and without a sandbox",
    },
    "--seed": {"type": whole(), "default": 0, "help": "of prompts and of the random predictor"},
    "--output": {
        "type": output,
        "metavar": "FILE",
        "help": "of the JSON (results/runs/evaluate/TIME.json)",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, about in OPTIONS.items():
        parser.add_argument(name, **about)


def main(args: argparse.Namespace) -> int:
    if args.output is not None:
        writable(args.output)
    own, others = _tasks_of(args.tasks)
    pairs = _modes_of(args)
    stored = args.model is not None and (Path(args.model).expanduser() / INDEX).is_file()
    with moelab.open_model(
        args.model, memory=args.memory or ("auto" if stored else None), device=args.device
    ) as model:
        modes, batch = _contexts(model, args, pairs)
        n = 200 if args.limit is None else args.limit
        # first: a task that cannot be loaded fails before hours of work
        samples = _lm_eval(model, modes, others, args, n, batch) if others else {}
        found = accuracy.result(samples, {})
        if own:
            mine = accuracy.compare(
                model,
                modes,
                own,
                n=n,
                windows=max(n // 4, 4),
                tokens=args.tokens,
                seed=args.seed,
                decode=args.decode_only,
                batch_size=batch,
            )
            found = {"kind": mine["kind"]} | {
                key: mine[key] | found[key] for key in ("settings", "scores", "samples")
            }
    print(accuracy.table(found))
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
        if key not in ("main", "debug", "output")
    }
    found["settings"] = settings | found["settings"] | {"model": model.spec.name, "batch": batch}
    now = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    path = args.output or results_root() / "runs" / "evaluate" / f"{now}.json"
    print(f"\n{write_json(path, found)}")
    return 0


def _tasks_of(text: str) -> tuple[list[str], list[str]]:
    """(moelab's own tasks, lm-eval's) of names with commas between them."""
    wanted = list(dict.fromkeys(name for name in text.split(",") if name))
    if not wanted:
        raise ValueError(
            f"--tasks names none; there are {', '.join(accuracy.TASKS)}, and lm-eval's"
        )
    own = [name for name in wanted if name in accuracy.TASKS]
    return own, [name for name in wanted if name not in accuracy.TASKS]


def _modes_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(mode, predictor) of each mode but the baseline; ValueError for what other options lack."""
    pairs = [parse_mode(text) for text in args.modes.split(",") if text and text != "baseline"]
    if args.estimator is None and {"estimator", "hybrid"} & {predictor for _, predictor in pairs}:
        raise ValueError(
            "the predictors estimator and hybrid, and the mode router-free, need --estimator FILE: "
            "moelab.speculate.training.train makes one (notebook 04)"
        )
    if any(mode == CACHE_AWARE for mode, _ in pairs) and not args.decode_only:
        raise ValueError("cache-aware routing acts in decode steps: give --decode-only, too")
    return pairs


def _contexts(
    model: Any, args: argparse.Namespace, pairs: list[tuple[str, str]]
) -> tuple[Record, int]:
    """({mode: what makes its context}, the batch size at which all of them can run)."""
    modes: Record = {"baseline": nullcontext}
    parts = Ingredients(model, args)
    batch = args.batch
    for mode, predictor in pairs:
        if mode == EXECUTOR:
            name, options = executor_options(predictor)
            context = partial(moelab.using, model, executor=name, **options)
            run = make_executor(model, name, **options)
            batch = batch if run is None or run.lossless else 1
        elif mode == CACHE_AWARE:
            context = partial(moelab.using, model, executor="fast", cache_aware=float(predictor))
        else:
            made = partial(registry.make, "predictor", predictor, model, **parts.of(predictor))
            context = partial(speculation, model, made, mode, not args.decode_only)
        modes[mode if mode == "router-free" else f"{mode}:{predictor}"] = context
    return modes, batch


def _lm_eval(
    model: Any, modes: Record, names: list[str], args: argparse.Namespace, n: int, batch: int
) -> accuracy.Samples:
    from moelab.evaluation import lm_eval_adapter

    tasks = lm_eval_adapter.load(
        names, model, n=n, tokens=args.tokens, seed=args.seed, run_code=args.run_code
    )
    still = [task.task_name for task in tasks if task.OUTPUT_TYPE != "generate_until"]
    if args.decode_only and still:
        raise ValueError(
            f"{', '.join(still)} generates nothing, so --decode-only would change nothing; leave "
            "it out, or choose tasks that generate"
        )
    return lm_eval_adapter.compare(
        model, modes, tasks, limit=args.limit, batch_size=batch, chat=args.chat
    )


def parse_mode(text: str) -> tuple[str, str]:
    """(mode, predictor) of "hint", "speculative:hybrid", "router-free" …; of an executor, its name
    and options, of cache-aware routing its margin."""
    from moelab.speculate import MODES, PREDICTORS

    mode, _, predictor = text.partition(":")
    if mode == EXECUTOR:
        executor_options(predictor)  # an error comes before a model is opened
        return mode, predictor
    if mode == CACHE_AWARE:
        try:
            return mode, str(require_margin(float(predictor)))
        except ValueError:
            raise ValueError(
                f"{text!r} has no margin of logits, 0 or more; write {CACHE_AWARE}:0.5"
            ) from None
    registry.require("mode", mode, ["baseline", *MODES, EXECUTOR, CACHE_AWARE])
    predictor = predictor or ("estimator" if mode == "router-free" else DEFAULT_PREDICTOR)
    registry.require("predictor", predictor, PREDICTORS)
    if mode == "router-free" and predictor != "estimator":
        raise ValueError(
            f"{text!r}: without routers only the estimator can choose experts; write router-free"
        )
    return mode, predictor


def executor_options(text: str) -> tuple[str, Record]:
    """(name, options) of "NAME" or "NAME:option=value:…"; values are numbers, true, false or none
    where possible."""
    name, *options = text.split(":")
    given: Record = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{EXECUTOR}:{text}: {option!r} is no option; write OPTION=VALUE")
        given[key] = value
        with suppress(ValueError, SyntaxError):
            given[key] = ast.literal_eval(
                value.capitalize() if value.lower() in ("true", "false", "none") else value
            )
    registry.find("executor", name)
    if given:
        registry.make("executor", name, **given)
    return name, given


def speculation(model: Any, made: Callable[[], Any], mode: str, prefill: bool) -> Any:
    """The context in which a model speculates; every use has a predictor of its own."""
    from moelab.speculate import Speculation

    return Speculation(model, made(), mode, prefill=prefill)


class Ingredients:
    """What predictors need, each measured once, and only if a predictor needs it."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        from moelab.speculate.estimator import Estimator

        self.model = model
        self.args = args
        self.seed = args.seed
        self.estimator = args.estimator and Estimator.load(
            args.estimator, model
        )  # before anything is measured

    def of(self, predictor: str) -> Record:
        """Argument → value of what a predictor takes."""
        from moelab.speculate import takes

        return {name: getattr(self, name) for name in takes(predictor)}

    @cached_property
    def prompts(self) -> list[questions.Prompt]:
        """Prompts of the training split."""
        return questions.prompts(
            SOURCES,
            max(1, self.args.calibration // len(SOURCES)),
            tokens=self.args.tokens,
            seed=self.seed,
            split="train",
            count=token_count(self.model.tokenizer),
        )

    @cached_property
    def vectors(self) -> Any:
        """Default vectors, measured on `prompts`."""
        from moelab.speculate import default_vectors

        return default_vectors(self.model, self.prompts)

    @cached_property
    def trace(self) -> Any:
        """The routing of `prompts`."""
        from moelab.recording import record

        return record(self.model, self.prompts, batch_size=self.args.batch)

    @cached_property
    def choice(self) -> Any:
        """Which signal predicts each layer best, on `prompts`."""
        from moelab.evaluation.predictors import choose
        from moelab.recording import record

        trace = record(self.model, self.prompts, hidden=True, batch_size=self.args.batch)
        return choose(trace, self.model, self.vectors, self.estimator)
