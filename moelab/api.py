"""The one way in: `open_model` opens any MoE model, in memory or within a budget; `using` changes
how it runs.

    with moelab.open_model("Qwen/Qwen3-30B-A3B", memory="8GB", executor="fast", prefetch="router")
    as lm: … with moelab.using(lm, executor="gemv"): …

In place of a name of the registry (`moelab.names`, `moelab.describe`), an object of your own will
do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moelab import datasets, registry
from moelab.calibration import Calibration
from moelab.checkpoint.convert import kept_store
from moelab.checkpoint.opening import open_checkpoint
from moelab.fast.fast_decode import FastDecode
from moelab.fast.packing import DENSE
from moelab.models import eager, plugged
from moelab.models.identity import identity
from moelab.models.patches import Patches
from moelab.offloading.cache_aware import CacheAwareRouting, require_margin
from moelab.offloading.offload import DEFAULT_POLICY, offload
from moelab.offloading.session import Session
from moelab.speculate import INGREDIENTS, Predictor, Speculation, default_vectors, takes
from moelab.speculate.predictors import lacking
from moelab.static.tiers import Tiers, capacity_tiers, form_groups
from moelab.store.layout import ExpertStore
from moelab.zipmoe.measure import quick_delays
from moelab.zipmoe.planner import auto_pools

#: further options with `memory`: those of `offload` and of `Reader`
OPTIONS = (
    "plan",
    "scope",
    "margin",
    "staging",
    "ahead",
    "delays",
    "mode",
    "bandwidth",
    "verify",
    "compact",
    "scheduler",
)

#: prompts by which default vectors are measured, if a predictor needs them and none are given
PROMPTS = 4


def open_model(
    source: str | Path | ExpertStore | None = None,
    *,
    memory: str | float | int | None = None,
    cache: Any = DEFAULT_POLICY,
    executor: Any = "exact",
    prefetch: Any = None,
    calibration: Calibration | None = None,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device | None = None,
    workers: int = 1,
    dense: str | None = None,
    experts: str = "resident",
    quantize: str | None = None,
    cache_aware: float | None = None,
    **options: Any,
) -> Any:
    """Open a mixture-of-experts model for inference: everything in memory or, with `memory`, its
    experts on disk.

    source : hub id, folder of a checkpoint or an expert store, `ExpertStore`, or None for the small
        model shipped.
    memory : for routed experts: bytes, a share of what all of them take (0.5, "50%"), "8GB", or
        "auto" for what this machine has left. It is allocated at once and never exceeded; if all
        fit, they are read at once, too. None loads everything as transformers does.
    cache : with `memory`, who is evicted: a name of `moelab.names("cache")` or a policy of your
        own.
    executor : what computes the experts: a name of `moelab.names("executor")` or a function of your
        own. "exact" is transformers' own arithmetic, bit for bit; "fast" is equal within the
        dtype's tolerance, and computes attention, norms, routers and linear layers of single tokens
        in kernels of its own, too.
    prefetch : with `memory`, which experts of the next layer are loaded ahead: a name of
        `moelab.names("predictor")`, a predictor, or what makes one of the model. No bit of the
        output changes. It is on in tokens once that was seen to be faster, see
        `moelab.offloading.prefetch_gate`.
    calibration : counts of this very model, for executors with static capacities, for plan="auto"
        and for prefetch="static".
    dtype, device : to compute in ("auto" takes what config.json says, or else the checkpoint's);
        where to, or the CPU. On a GPU, `memory` is for its own, and mode="pinned" keeps all experts
        in the CPU's.
    workers : with `memory`, threads that decompress.
    dense : with the executor "fast", multiplies all other linear layers and the head by copies of
        fewer bits a weight, made when the model is opened and kept beside them: "bf12" is lossless,
        a quarter fewer bytes a token, 75 % more memory for them; "int8", "int4" and "mxfp4" round
        them, a half to a quarter of the bytes, 53 to 27 % more, until memory is short: then the
        system drops what it has mapped of their files, which nothing reads any more.
    experts : "external" neither reads nor allocates the experts and supplies them one by one from
        the checkpoint, slowly, until another source is plugged in (`moelab.models.plug`).
    quantize : round the experts to a name of `moelab.names("format")`: the model is converted to a
        store in the cache (data/cache, $MOELAB_CACHE), unless that was done before, and opened from
        there.
    cache_aware : with `memory`, lossy: logits by which an expert on disk must lead one in memory to
        be chosen (`moelab.offloading.cache_aware`). Not with the executor "exact".
    options : with `memory`, further ones of `moelab.offloading.offload.offload`: plan, staging,
        ahead, verify …

    Returns a transformers model in eval mode and a context manager that closes it, with
    `.tokenizer` (None if it has none that can be read), `.spec`, and `.moelab`: metrics, run,
    `cancel()`, `close()` (`offloading.session.Session`).

    Raises FileNotFoundError for no such folder, or a hub id that can be had neither from the cache
    nor the network; ValueError for a dense model, an unknown architecture, a damaged or incomplete
    checkpoint, a budget that is too small, an unknown name or option, another model's calibration
    or predictor."""
    if unknown := options.keys() - set(OPTIONS):
        raise ValueError(
            f"open_model takes no {', '.join(sorted(unknown))}; beside the parameters of its docstring, "
            f"with memory, it takes {', '.join(OPTIONS)}"
        )
    if dense is not None and (dense not in DENSE or executor != "fast"):
        raise ValueError(
            f'dense is {dense!r}; it must be one of {", ".join(DENSE)}, and only the executor "fast" '
            f"computes with it"
        )
    _check_executor(executor)
    _check_device(device)
    if cache_aware is not None and require_margin(cache_aware) and executor in ("exact", None):
        raise ValueError(
            'cache_aware changes the output, and the executor "exact" promises every bit of it: use '
            'executor="fast"'
        )
    _check(
        "cache",
        cache,
        all(hasattr(cache, name) for name in ("touch", "victim")),
        "a policy with the methods touch(key, step) and victim(resident)",
    )
    if not isinstance(calibration, Calibration | None):
        raise TypeError(
            f"the calibration is {calibration!r}; it must be a moelab.Calibration: calibrate(trace) counts "
            f"one, Calibration.load(path) reads one"
        )
    _check_prefetch(prefetch, calibration)
    if quantize is not None:
        source = kept_store(
            source.folder if isinstance(source, ExpertStore) else source, quantize=quantize
        )
    if memory is None:
        wanted = {
            "cache": cache != DEFAULT_POLICY,
            "prefetch": prefetch is not None,
            "workers": workers != 1,
            "cache_aware": cache_aware is not None,
        }
        if given := [name for name, differs in wanted.items() if differs] + list(options):
            raise ValueError(
                f"{', '.join(given)}: for experts that are loaded when they are needed; give "
                f"memory= (--memory), too"
            )
        folder = source.folder if isinstance(source, ExpertStore) else source
        model = open_checkpoint(folder, experts=experts, dtype=dtype, device=device)
        Session(model)
    else:
        ahead = options.pop("ahead", None if prefetch is not None else 0)
        if options.get("plan") == "auto":
            options["plan"] = partial(auto_pools, calibration)
        options = {
            "compact": "kernels" if executor in ("fast", "gemv") else False,
            "delays": quick_delays,
        } | options
        model = offload(
            source,
            memory,
            policy=cache,
            workers=workers,
            ahead=ahead,
            dtype=dtype,
            device=device or "cpu",
            **options,
        )
    with ExitStack() as unless_open:
        unless_open.callback(model.moelab.close)
        if calibration is not None:
            calibration.require(identity(model), model.spec)
        if executor != "exact":
            model.moelab.enter(_executing(model, executor, calibration, dense))
        if prefetch is not None:
            model.moelab.enter(_prefetching(model, prefetch, calibration))
        if cache_aware is not None:
            model.moelab.enter(_routing(model, cache_aware))
        model.moelab.reset()  # of what was run to measure default vectors
        unless_open.pop_all()
    return model


def _check(kind: str, given: Any, fits: bool, wanted: str) -> None:
    """ValueError for an unknown name, TypeError for what is neither a name nor `wanted`, before
    anything is opened."""
    if isinstance(given, str):
        registry.find(kind, given)
    elif not fits:
        raise TypeError(
            f"the {kind} is {given!r}; it must be {wanted}, or one of {', '.join(registry.names(kind))}"
        )


def _check_executor(executor: Any) -> None:
    _check(
        "executor",
        executor,
        executor is None or callable(executor) and not isinstance(executor, type),
        "a function of (x, ids, weights, experts), or an object that is called like one",
    )


def _check_prefetch(prefetch: Any, calibration: Calibration | None) -> None:
    """As `_check`; ValueError for a name whose predictor needs what nobody can measure, but a
    calibration for one."""
    if prefetch is None:
        return
    _check(
        "predictor",
        prefetch,
        isinstance(prefetch, Predictor) or callable(prefetch),
        "a Predictor, or what makes one of a model",
    )
    needed = lacking(prefetch) if isinstance(prefetch, str) else []
    if needed and not (prefetch == "static" and calibration is not None):
        raise ValueError(
            f"the predictor {prefetch} needs {' and '.join(f'{p}={INGREDIENTS[p]}' for p in needed)}: "
            f"prefetch=lambda model: moelab.api.make_predictor(model, {prefetch!r}, "
            f"{', '.join(f'{p}=…' for p in needed)})"
        )


def _check_device(device: Any) -> None:
    """ValueError for one that torch does not know, or that is not here."""
    try:
        torch.empty(0, device=device)
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
    calibration: Calibration | None = None,
    cache_aware: float | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Within the block an opened model runs on another executor or predictor, afterwards as before.

    executor, prefetch, calibration, cache_aware : as of `open_model`; None leaves what is there.
    options : of the executor, if it is a name.

    Raises ValueError: a model that `open_model` has not opened, options without a name; TypeError:
    no executor."""
    _check_executor(executor)
    _check_prefetch(prefetch, calibration)
    if options and not isinstance(executor, str):
        raise ValueError(
            f"using takes no {', '.join(options)}: it changes executor, prefetch, calibration and "
            f"cache_aware, and all else are options of an executor that is given by its name"
        )
    if not hasattr(model, "moelab"):
        raise ValueError(
            f"this {type(model).__name__} was not opened by moelab.open_model, or it is closed; on a "
            f"model of transformers' own, moelab.models.plugged(model, executor) changes the executor"
        )
    with ExitStack() as stack:
        if executor is not None:
            stack.enter_context(_executing(model, executor, calibration, **options))
        if prefetch is not None:
            stack.enter_context(_prefetching(model, prefetch, calibration))
        if cache_aware is not None:
            stack.enter_context(_routing(model, cache_aware))
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
        patches.enter_context(plugged(model, run or eager))
        if executor == "fast":
            patches.enter_context(FastDecode(model, dense=dense))
        yield


def make_executor(
    model: Any, name: str, calibration: Calibration | None = None, **options: Any
) -> Any:
    """An executor by its name, with what it needs of the model where it is not among the options;
    None for "exact".

    Static capacities ("tiered", "grouped") follow from the calibration or, without, from a uniform
    popularity, and pad rather than drop."""
    if name == "exact":
        return None
    if name in ("tiered", "grouped") and not options:
        counts = (
            torch.ones(model.spec.L, model.spec.E) if calibration is None else calibration.counts()
        )
        tokens, chunk = int(counts[0].sum()) // model.spec.K or 1, 256
        tiers: list[Tiers] = capacity_tiers(counts, tokens, chunk)
        options = {"overflow": "pad"} | (
            {"capacities": [of.capacity for of in tiers]}
            if name == "tiered"
            else {"groups": [form_groups(of, layer, size=4) for of, layer in zip(tiers, counts)]}
        )
    return registry.make("executor", name, **options)


@contextmanager
def _prefetching(
    model: Any, prefetch: Any, calibration: Calibration | None = None
) -> Iterator[None]:
    session = model.moelab
    if session.engine is None:
        raise ValueError(
            "all experts of this model are in memory, so nothing can be prefetched: open it with memory="
        )
    before = session.speculation
    popularity = {"trace": calibration} if prefetch == "static" else {}
    with Speculation(
        model, make_predictor(model, prefetch, **popularity), mode="hint"
    ) as speculation:
        session.speculation = speculation
        try:
            yield
        finally:
            session.speculation = before


@contextmanager
def _routing(model: Any, margin: float) -> Iterator[None]:
    with CacheAwareRouting(model, margin) as routing, Patches() as patches:
        patches.put(model.moelab, "routing", routing)
        yield


def make_predictor(model: Any, predictor: Any, **ingredients: Any) -> Predictor:
    """A predictor by its name, or what a function makes of the model; default vectors are measured
    if not given."""
    if isinstance(predictor, Predictor):
        return predictor
    if not isinstance(predictor, str):
        made = predictor(model)
        _check(
            "predictor",
            made,
            isinstance(made, Predictor),
            "a Predictor, or what makes one of a model",
        )
        return made
    if "vectors" in takes(predictor) and "vectors" not in ingredients:
        with _executing(model, "exact"):  # which sums expert by expert
            ingredients["vectors"] = default_vectors(
                model,
                datasets.prompts(
                    "prose", PROMPTS, tokens=128, count=datasets.token_count(model.tokenizer)
                ),
            )
    return registry.make("predictor", predictor, model, **ingredients)
