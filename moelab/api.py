"""The one way in: `open_model` opens any MoE model, in memory or within a budget; `using` changes
how it runs.

    lm = moelab.open_model("Qwen/Qwen3-30B-A3B", memory="8GB", executor="fast", prefetch="router")
    with moelab.using(lm, executor="gemv"):
        …

In place of a name of the registry (`moelab.names`, `moelab.describe`), an object of your own will
do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.opening import backend_for, open_beside, prompts_through
from moelab.base import registry
from moelab.base.arguments import checked
from moelab.base.files import beside
from moelab.base.library import passages, token_count
from moelab.base.records import Record, Records
from moelab.calibration import Calibration, calibrate
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.convert import kept_store
from moelab.checkpoint.opening import open_checkpoint
from moelab.experts import AS_THEY_LIE
from moelab.fast.fast_decode import FastDecode
from moelab.fast.packing import DENSE
from moelab.models import discover, eager, plugged
from moelab.models.identity import identity
from moelab.models.patches import Patches
from moelab.offloading.offload import Offloading, offload
from moelab.offloading.prefetch_gate import ungated
from moelab.offloading.session import Session
from moelab.speculate import (
    DefaultVectors,
    Estimator,
    Predictor,
    Speculation,
    default_vectors,
    takes,
)
from moelab.speculate.predictors import require_parts
from moelab.static.static import NEED_SALIENCY, ORDERS, OVERFLOW, Saliency
from moelab.static.tiers import executor_options
from moelab.store.fewbit import require_rounding
from moelab.store.layout import ExpertStore
from moelab.trace import RoutingTrace
from moelab.zipmoe.measure import quick_delays
from moelab.zipmoe.planner import auto_pools

#: prompts by which default vectors are measured, if a predictor needs them and none are given
PROMPTS = 4
#: of an option in the docs, by what it needs
MARKS = {None: "", "memory": "*", "ane": "**"}
#: what `prefetch` may be for loading on demand, and `speculate` for what the routers choose
NONE = (None, "none")
#: what `speculate` may be to run no router where the estimator has predicted (§6.4)
ROUTER_FREE = "router-free"
#: option → what it does, for the docs and the command line
OPTIONS: Records = beside(__file__)
#: reads a format on the command line
rounding = checked(require_rounding)


@dataclass(frozen=True, kw_only=True)
class OpenOptions(Offloading):
    """How a model is opened; api.toml is the one description of it, for `open_model`, the command line
    and the docs. Making one checks it, before anything is opened.

    Raises ValueError: an unknown name, or options that exclude each other; TypeError: what is
    neither a name nor an object of the kind."""

    memory: str | float | int | None = None
    executor: Any = "exact"
    prefetch: Any = "auto"
    speculate: Any = None
    estimator: Any = None
    vectors: Any = None
    calibration: Any = None
    dense: str | None = None
    quantize: str | None = None
    experts: str = "resident"
    ane: str | Path | None = None
    overflow: str = "prune"
    order: str = "saliency"

    def __post_init__(self) -> None:
        self._require_needed("memory", "for experts that are loaded when they are needed")
        self._require_needed("ane", "for prompts through the packages of a Neural Engine")
        registry.require("overflow", self.overflow, OVERFLOW)
        registry.require("order", self.order, ORDERS)
        if self.ane is not None and self.on.type != "cpu":
            raise ValueError(
                f"the device is {str(self.device)!r}; beside a Neural Engine the CPU computes"
            )
        if self.dense is not None and (self.dense not in DENSE or self.executor != "fast"):
            raise ValueError(
                f"dense is {self.dense!r}; it must be one of {', '.join(DENSE)}, and only the executor "
                f'"fast" computes with it'
            )
        if self.hybrid and (self.executor == "exact" or self.prefetch not in ("auto", *NONE)):
            raise ValueError(
                f"hybrid with the executor {self.executor!r} and prefetch {self.prefetch!r}: experts that "
                'are computed elsewhere are added up otherwise, so give executor="fast"; nothing is '
                "prefetched beside it"
            )
        _check("cache", self.cache)
        _check_device(self.device)
        _check("executor", self.executor)
        _check_predictors(self.prefetch, self.speculate, self.parts)

    @property
    def executes(self) -> bool:
        return self.speculate not in NONE

    @cached_property
    def popular(self) -> torch.Tensor | None:
        given = self.parts.get("trace")
        return None if given is None else given.counts()

    @cached_property
    def parts(self) -> Record:
        """What predictors are made of, files read, as far as it is given."""
        return parts_of(self.estimator, self.vectors, self.calibration)

    def _require_needed(self, needs: str, purpose: str) -> None:
        """ValueError for options without the one that they need; beside packages, experts are loaded
        when they are needed."""
        of = [name for name, of in OPTIONS.items() if of.get("needs") == needs]
        given = [n for n in of if getattr(self, n) not in (getattr(OpenOptions, n), None)]
        if given and self.ane is None and getattr(self, needs) is None:
            raise ValueError(f"{', '.join(given)}: {purpose}; give {needs}= (--{needs}), too")

    def completed(self) -> OpenOptions:
        """With what follows from executor, prefetch and calibration, unless it is given."""
        kernels = "kernels" if self.executor in AS_THEY_LIE else False
        return replace(
            self,
            ahead=None
            if self.prefetch not in NONE and self.ahead == 0 and not self.hybrid
            else self.ahead,
            compact=kernels if self.compact is None else self.compact,
            delays=quick_delays if self.delays is None else self.delays,
            plan=partial(auto_pools, self.parts.get("trace")) if self.plan == "auto" else self.plan,
        )


def open_model(source: str | Path | ExpertStore | Checkpoint | None = None, **options: Any) -> Any:
    """Open a mixture-of-experts model for inference: everything in memory or, with `memory`, its
    experts on disk.

    source : hub id, folder of a checkpoint or an expert store, `ExpertStore`, or None for the small
        model shipped.
    options : fields of `OpenOptions`.

    Returns a transformers model in eval mode and a context manager that closes it, with
    `.tokenizer` (None if it has none that can be read), `.spec`, and `.moelab`: metrics, run,
    `cancel()`, `close()` (`offloading.session.Session`).

    Raises FileNotFoundError for no such folder, or a hub id that can be had neither from the cache
    nor the network; ValueError for a dense model, an unknown architecture, a damaged or incomplete
    checkpoint, a budget that is too small, an unknown name, another model's calibration,
    predictor or packages; TypeError for an unknown option."""
    asked, checkpoint = OpenOptions(**options), Checkpoint.at(source)
    if asked.quantize is not None:
        how = {"quantize": asked.quantize, "calibration": asked.parts.get("trace")}
        checkpoint = Checkpoint.at(kept_store(checkpoint, **how))
    if checkpoint.gguf and asked.memory is asked.ane is None and asked.experts == "resident":
        # all of them, in the bits of the file
        asked = replace(asked, memory=1.0, compact=asked.executor not in AS_THEY_LIE or None)
    if asked.ane is not None:
        backend = backend_for(ConvertedModel(asked.ane))
        model = open_beside(backend.converted, checkpoint, asked.memory, asked.completed())
    elif asked.memory is None:
        model = open_checkpoint(
            checkpoint, experts=asked.experts, dtype=asked.dtype, device=asked.device
        )
        Session(model)
    else:
        model = offload(checkpoint, asked.memory, asked.completed())
    with ExitStack() as unless_open:
        unless_open.callback(model.moelab.close)
        calibration = asked.parts.get("trace")
        if isinstance(calibration, RoutingTrace):  # only a plan asks for the order
            calibration = calibrate(calibration)
        if calibration is not None:
            calibration.require(identity(model), model.spec)
        if asked.executor != "exact":
            model.moelab.enter(_executing(model, asked.executor, calibration, asked.dense))
        ahead = model.moelab.engine is not None and asked.prefetch not in NONE
        if asked.executes or ahead:
            model.moelab.enter(_predicting(model, asked.prefetch, asked.speculate, asked.parts))
        if asked.ane is not None:
            model.moelab.enter(prompts_through(model, backend, asked.overflow, asked.order))
        model.moelab.reset()  # of what was run to measure default vectors
        unless_open.pop_all()
    return model


open_model.__doc__ = "\n".join(
    [open_model.__doc__ or "", "", "    Options, those marked * with `memory` only, ** with `ane`:"]
    + [
        f"    {name}{MARKS[of.get('needs')]} : {of['purpose']} [{getattr(OpenOptions, name)!r}]"
        for name, of in OPTIONS.items()
    ]
)


#: kind of the registry → whether an object may take the place of a name, and in words which
OWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cache": (
        lambda own: hasattr(own, "touch") and hasattr(own, "victim"),
        "a policy with the methods touch(key, step) and victim(resident)",
    ),
    "executor": (
        lambda own: own is None or callable(own) and not isinstance(own, type),
        "a function of (x, ids, weights, experts), or an object that is called like one",
    ),
    "predictor": (
        lambda own: own is None or isinstance(own, Predictor) or callable(own),
        "a Predictor, or what makes one of a model",
    ),
}


def _check(kind: str, given: Any) -> None:
    """ValueError for an unknown name, TypeError for what is neither a name nor of the kind."""
    fits, wanted = OWN[kind]
    if isinstance(given, str):
        registry.find(kind, given)
    elif not fits(given):
        raise TypeError(
            f"the {kind} is {given!r}; it must be {wanted}, or one of {', '.join(registry.names(kind))}"
        )


def _check_predictors(prefetch: Any, speculate: Any, given: Collection[str]) -> None:
    """As `_check`; ValueError for a predictor that lacks a part which nobody measures, or for two."""
    for name in (prefetch, speculate):
        name = "estimator" if name == ROUTER_FREE else name
        if name not in ("auto", *NONE):
            _check("predictor", name)
            if isinstance(name, str):
                require_parts(name, given)
    if speculate not in NONE and prefetch not in ("auto", *NONE):
        raise ValueError(
            f"prefetch is {prefetch!r} and speculate {speculate!r}: experts that are executed as "
            "predicted are loaded as predicted; leave prefetch out"
        )


def parts_of(estimator: Any = None, vectors: Any = None, calibration: Any = None) -> Record:
    """Of what is given, files or objects: the parts of predictors (`moelab.speculate.INGREDIENTS`).
    TypeError for what is neither."""
    estimator = _read("estimator", estimator, Estimator, Callable)
    vectors = _read("vectors", vectors, DefaultVectors, DefaultVectors)
    parts = {
        "estimator": estimator,
        "choice": getattr(estimator, "choice", None),
        "vectors": vectors or getattr(estimator, "vectors", None),
        "trace": _read("calibration", calibration, Calibration, Calibration | RoutingTrace),
    }
    return {name: part for name, part in parts.items() if part is not None}


def _read(name: str, given: Any, reader: Any, kind: Any) -> Any:
    """What is given, read if it is a file."""
    if isinstance(given, str | Path):
        return reader.load(given)
    if not isinstance(given, kind | None):
        told = f"a file, or what {reader.__name__}.load reads"
        raise TypeError(f"the {name} is {given!r}; it must be {told}")
    return given


def _check_device(device: Any) -> None:
    """ValueError for one that torch does not know, or that is not here."""
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"the device is {str(device)!r}, where torch cannot compute here "
            f"({str(error).splitlines()[0]}); `moelab doctor` says what there is"
        ) from error


@contextmanager
def using(
    model: Any,
    *,
    executor: Any = None,
    prefetch: Any = None,
    speculate: Any = None,
    estimator: Any = None,
    vectors: Any = None,
    calibration: Any = None,
    **options: Any,
) -> Iterator[Any]:
    """Within the block an opened model runs on another executor or predictor, afterwards as before.

    executor, prefetch, speculate, estimator, vectors, calibration : as of `open_model`; None leaves
        what is there, prefetch="none" loads on demand, speculate="none" executes what the routers
        choose.
    options : of the executor, if it is a name.

    Raises ValueError: a model that `open_model` has not opened, options without a name; TypeError:
    no executor."""
    parts = parts_of(estimator, vectors, calibration)
    _check("executor", executor)
    _check_predictors(prefetch, speculate, parts)
    if options and not isinstance(executor, str):
        raise ValueError(
            f"using takes no {', '.join(options)}: it changes executor, predictors and what they are "
            f"made of; all else are options of an executor that is given by its name"
        )
    if not hasattr(model, "moelab"):
        raise ValueError(
            f"this {type(model).__name__} was not opened by moelab.open_model, or it is closed; on a "
            f"model of transformers' own, moelab.models.plugged(model, executor) changes the executor"
        )
    with ExitStack() as stack:
        if executor is not None:
            stack.enter_context(_executing(model, executor, parts.get("trace"), **options))
        if prefetch is not None or speculate is not None:
            stack.enter_context(_predicting(model, prefetch, speculate, parts))
        yield model


@contextmanager
def _executing(
    model: Any,
    executor: Any,
    calibration: Calibration | None = None,
    dense: str | None = None,
    **options: Any,
) -> Iterator[None]:
    run = (
        make_executor(model, executor, calibration, **options)
        if isinstance(executor, str)
        else executor
    )
    with Patches() as patches:
        if (saliency := getattr(run, "saliency", None)) is not None:
            patches.enter_context(saliency)
        patches.enter_context(plugged(model, run or eager))
        if executor == "fast":
            patches.enter_context(FastDecode(model, dense=dense))
        yield


def make_executor(
    model: Any, name: str, calibration: Calibration | None = None, **options: Any
) -> Any:
    """An executor by its name, with what it needs of the model where it is not among the options;
    None for "exact".

    Static capacities ("tiered", "grouped") follow from the calibration, see `static.tiers`."""
    if name == "exact":
        return None
    if name in ("tiered", "grouped") and not {"capacities", "groups"} & set(options):
        options = executor_options(name, model.spec, calibration) | options
        if options["overflow"] == "prune" and options.get("order", "saliency") in NEED_SALIENCY:
            options.setdefault("saliency", Saliency(model, discover(model)))
    return registry.make("executor", name, **options)


@contextmanager
def _predicting(
    model: Any, prefetch: Any, speculate: Any, parts: Mapping[str, Any]
) -> Iterator[None]:
    """The next layer's experts are predicted: executed, if `speculate` says so, or hints alone."""
    session = model.moelab
    executes = speculate not in NONE
    if session.engine is None and not executes and prefetch not in NONE:
        raise ValueError(
            "all experts of this model are in memory, so nothing can be prefetched: open it with memory="
        )
    mode, name = ("speculative", speculate) if executes else ("hint", prefetch)
    if name == ROUTER_FREE:
        mode, name = ROUTER_FREE, "estimator"
    elif name == "auto" and "estimator" in parts:
        name = "estimator"
    predictor: Predictor | None = None
    if name == "auto":
        with suppress(ValueError):  # an architecture whose routers cannot be asked
            predictor = make_predictor(model, "router")
    elif name not in NONE:
        predictor = make_predictor(model, name, **parts)
    with Patches() as patches:
        patches.put(model, "speculation", None)  # whatever else predicts rests meanwhile
        if predictor is not None:
            patches.enter_context(Speculation(model, predictor, mode))
        if (
            executes and session.engine is not None
        ):  # what is predicted is needed, so it always pays
            patches.enter_context(ungated(session.engine))
        patches.put(session, "speculation", model.speculation)
        yield


def make_predictor(model: Any, predictor: Any, ahead: int = 1, **parts: Any) -> Predictor:
    """A predictor by its name, or what a function makes of the model; of `parts` it takes what it
    is made of, and default vectors are measured if they are not among them."""
    if isinstance(predictor, Predictor):
        return predictor
    if not isinstance(predictor, str):
        made = predictor(model)
        if not isinstance(made, Predictor):
            raise TypeError(f"the predictor is {made!r}; it must be {OWN['predictor'][1]}")
        return made
    parts = {name: parts[name] for name in takes(predictor) if name in parts}
    if "vectors" in takes(predictor) and "vectors" not in parts:
        with _executing(model, "exact"):  # which sums expert by expert
            texts = passages("prose", PROMPTS, 128, token_count(model.tokenizer))
            parts["vectors"] = default_vectors(model, texts)
    return registry.make("predictor", predictor, model, ahead=ahead, **parts)
