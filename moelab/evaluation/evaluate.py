"""`moelab evaluate [MODEL|STORE]`: accuracy of running a model in several modes, each against the
baseline.

    moelab evaluate                                  the small model, moelab's own tasks
    moelab evaluate --modes hint:router,speculative:hybrid,router-free --estimator FILE
    moelab evaluate qwen.store --memory 50% --modes speculative:quasi --tasks loss,gsm8k --limit 100
    moelab evaluate --modes executor:capacity:factor=1.25
    moelab evaluate MODEL --modes npumoe,npumoe:order=router:slack=0.75 --calibration FILE
    moelab evaluate MODEL --modes npumoe:capacities=32,64,128 --tasks boolq,hellaswag --few-shot 2
    moelab evaluate --memory 50% --decode-only --modes executor:fast

Modes are the registry's executors, and those of Speculating Experts: `hint` runs the true experts,
`speculative` the predicted ones, `router-free` the estimator's without a router (§4, §5.1, §6.4).
`npumoe` sends prompts through a plan for the Neural Engine, in the model's own arithmetic: its
options are those of `moelab ane plan`, `overflow` and `order`, and beside the accuracy stand the
routings that are dropped and the rows that are padded (NPUMoE Table 3).
With an executor that drops tokens, or a plan, every mode runs
at batch size 1, as the texts of a batch, and its padding, would compete for the same capacity."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

import moelab
from moelab.api import make_executor, parts_of
from moelab.base import registry
from moelab.base.arguments import described, one_of
from moelab.base.files import results_root, write_json
from moelab.base.records import Record
from moelab.calibration import Calibration, calibrate
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.evaluation import accuracy, questions
from moelab.evaluation.calibrate import SOURCES, prompts
from moelab.models.identity import identity
from moelab.recording import record
from moelab.speculate import MODES, PREDICTORS, Speculation, default_vectors, takes
from moelab.speculate.predictors import require_parts
from moelab.store.layout import INDEX

BASELINE = "baseline"

#: what makes a mode's context, of a model and what was measured for predictors
Make = Callable[[Any, "Ingredients"], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    described(__file__)(parser)
    parser.set_defaults(tasks=",".join(accuracy.TASKS))


def main(args: argparse.Namespace) -> int:
    tasks = list(dict.fromkeys(filter(None, args.tasks.split(","))))
    own = [name for name in tasks if name in accuracy.TASKS]
    others = [name for name in tasks if name not in own]
    texts = re.split(r",(?!\d)", args.modes)  # of numbers, a comma is within an option
    makes = [parse_mode(text, args) for text in texts if text not in ("", BASELINE)]
    stored = args.model is not None and (Path(args.model).expanduser() / INDEX).is_file()
    with moelab.open_model(
        args.model, memory=args.memory or ("auto" if stored else None), device=args.device
    ) as model:
        parts = Ingredients(model, args)
        modes = {BASELINE: nullcontext} | {
            name: partial(make, model, parts) for name, make, _ in makes
        }
        for entered in modes.values():  # what cannot run is told before the baseline is scored
            with entered():
                pass
        batch = args.batch if all(lossless for *_, lossless in makes) else 1
        # first: a task that cannot be loaded fails before hours of work
        samples, ran = _lm_eval(model, modes, others, args, batch) if others else ({}, {})
        found = accuracy.result(samples, {}, ran)
        if own or not others:
            n = args.limit or 200
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
            found = mine | {key: mine[key] | found[key] for key in ("scores", "samples")}
    print(accuracy.table(found))
    asked = {name: of for name, of in vars(args).items() if name not in ("main", "debug", "output")}
    settings = {name: str(of) if isinstance(of, Path) else of for name, of in asked.items()}
    found["settings"] = settings | found["settings"] | {"model": model.spec.name, "batch": batch}
    now = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    path = args.output or results_root() / "runs" / "evaluate" / f"{now}.json"
    print(f"\n{write_json(path, found)}")
    return 0


def _lm_eval(
    model: Any, modes: Record, names: list[str], args: argparse.Namespace, batch: int
) -> tuple[accuracy.Samples, Record]:
    from moelab.evaluation import lm_eval_adapter

    tasks = lm_eval_adapter.load(names, model, tokens=args.tokens, run_code=args.run_code)
    still = [task.task_name for task in tasks if task.OUTPUT_TYPE != "generate_until"]
    if args.decode_only and still:
        raise ValueError(
            f"{', '.join(still)} generates nothing, so --decode-only would change nothing; leave "
            "it out, or choose tasks that generate"
        )
    how = {"limit": args.limit, "few_shot": args.few_shot, "chat": args.chat}
    return lm_eval_adapter.compare(model, modes, tasks, batch_size=batch, **how)


def parse_mode(text: str, args: argparse.Namespace) -> tuple[str, Make, bool]:
    """(name, what makes its context, whether it computes every token) of "hint", "speculative:quasi",
    "executor:NAME:OPTION=VALUE" …; ValueError for what is unknown, or what other options lack."""
    mode, _, given = text.partition(":")
    registry.require("mode", mode, [BASELINE, *MODES, "executor", "npumoe"])
    if mode == "npumoe":
        return text, _through_plan(text, args), False
    if mode == "executor":
        name, _, texts = given.partition(":")
        options = {option: _value(of) for option, of in options_of(text, texts).items()}
        lossless = getattr(registry.find("executor", name), "lossless", True)
        if name in ("tiered", "grouped"):
            for option in options:
                registry.require(f"option of {name}", option, ("overflow", "order", "seed"))
            lossless = options.get("overflow") != "prune"
        elif options:
            registry.make("executor", name, **options)
        return text, partial(_executing, name, options), lossless
    predictor = given or ("estimator" if mode == "router-free" else "quasi")
    registry.require("predictor", predictor, PREDICTORS)
    if (mode == "router-free") > (predictor == "estimator"):
        raise ValueError(
            f"{text!r}: without routers only the estimator can choose experts; write router-free"
        )
    require_parts(predictor, ("trace", *(("estimator", "choice") if args.estimator else ())))

    def speculating(model: Any, parts: Ingredients) -> Any:
        made = registry.make("predictor", predictor, model, **parts.of(predictor))
        return Speculation(model, made, mode, prefill=not args.decode_only)

    return mode if mode == "router-free" else f"{mode}:{predictor}", speculating, True


@contextmanager
def _executing(name: str, options: Record, model: Any, parts: Ingredients) -> Iterator[Any]:
    """Within the block an executor runs; static ones, which count, are yielded."""
    static = name in ("tiered", "grouped", "capacity")
    made = name
    if static:
        needs = None if name == "capacity" else parts.calibration
        made, options = make_executor(model, name, needs, **options), {}
    with moelab.using(model, executor=made, **options):
        yield made


def options_of(mode: str, text: str) -> dict[str, str]:
    """Option → value of "OPTION=VALUE:OPTION=VALUE"."""
    pairs = [option.partition("=") for option in text.split(":") if option]
    for option, equals, _ in pairs:
        if not equals:
            raise ValueError(f"{mode}: {option!r} is no option; write OPTION=VALUE")
    return {option: value for option, _, value in pairs}


def _value(text: str) -> Any:
    """A number, true, false or null where possible."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _through_plan(mode: str, args: argparse.Namespace) -> Make:
    """What makes the context of "npumoe:OPTION=VALUE:…"."""
    from moelab.ane.commands import PLANNING, counted
    from moelab.ane.plan import make_plan
    from moelab.ane.runtime import prefill_through
    from moelab.static.static import ORDERS, OVERFLOW

    if args.device != "cpu" or args.memory is not None:
        raise ValueError(
            f"{mode} runs on the CPU with all experts in memory; leave out --device and --memory"
        )
    readers = PLANNING | {"overflow": one_of(OVERFLOW), "order": one_of(ORDERS)}
    given: Record = {}
    for name, text in options_of(mode, mode.partition(":")[2]).items():
        registry.require("option of npumoe", name, readers)
        try:
            given[name] = readers[name](text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{mode}: {name}: {error}") from None
    how = {name: given.pop(name) for name in ("overflow", "order") if name in given}
    spec = Checkpoint.at(args.model).spec
    make_plan(spec, np.ones((spec.L, spec.E)), 1, **given)  # what there cannot be is told now

    @cache
    def plan(parts: Ingredients) -> Any:
        return make_plan(spec, **counted(spec, parts.calibration), **given)

    return lambda model, parts: prefill_through(model, plan(parts), seed=args.seed, **how)


class Ingredients:
    """What predictors need, each measured once, and only if a predictor needs it."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args, self.seed = model, args, args.seed
        self.given = parts_of(args.estimator, args.vectors)

    def of(self, predictor: str) -> Record:
        """Argument → value of what a predictor takes and finds here."""
        parts = (
            (name, self.given.get(name) or getattr(self, name, None)) for name in takes(predictor)
        )
        return {name: part for name, part in parts if part is not None}

    @cached_property
    def prompts(self) -> list[questions.Prompt]:
        """Prompts of the training split."""
        n = max(1, self.args.prompts // len(SOURCES))
        return prompts(self.model, self.args, n, self.seed, SOURCES)

    @cached_property
    def calibration(self) -> Calibration:
        """Of the model, given or counted on `prompts`."""
        if self.args.calibration is None:
            return calibrate(self.trace, f"{len(self.prompts)} prompts, seed {self.seed}")
        found = Calibration.load(self.args.calibration)
        return found.require(identity(self.model), self.model.spec)

    @cached_property
    def vectors(self) -> Any:
        """Default vectors, measured on `prompts`."""
        return default_vectors(self.model, self.prompts)

    @cached_property
    def trace(self) -> Any:
        """The routing of `prompts`."""
        return record(self.model, self.prompts, batch_size=self.args.batch)
