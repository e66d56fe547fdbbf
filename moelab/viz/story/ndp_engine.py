"""The sections of notebook 07 that run a model: tensor parallelism in torch, prefetching in the
offloading engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moelab import open_model
from moelab.bench import dataset_free
from moelab.bench import ndp as bench
from moelab.evaluation import questions
from moelab.ndp.routing import recorded_routing, simulated_routing
from moelab.ndp.sweep import MODELS, Sweep
from moelab.recording import record
from moelab.viz.figures import bars, lines
from moelab.viz.story import ndp_tables as tables
from moelab.viz.story.ndp import CHOSEN, OURS, STEPS
from moelab.viz.story.ndp_tables import times

if TYPE_CHECKING:
    from moelab.lab.results import Run


def opened(source: str | None, memory: str | None, seed: int) -> tuple[Any, dict[int, float]]:
    """The model at `source`, and `tensor_parallel_error` of it, whose own model is gone before: one
    at a time is in memory."""
    cut = bench.tensor_parallel_error(
        source, _texts(seed)[0], experts="external" if memory else "resident"
    )
    return open_model(source, memory=memory or None), cut


def _texts(seed: int) -> list[str]:
    return [
        prompt.text for prompt in questions.prompts("code", 4, tokens=128, seed=seed, split="test")
    ]


def executed(run: Run, lm: Any, cut: Mapping[int, float], steps: int, seed: int) -> None:
    """Tensor parallelism of a model, and a recorded generation of it, on the modules; lm, cut : of
    `opened`."""
    texts = _texts(seed)
    run.metric(
        "tensor_parallel_within_rounding", max(cut.values()) < 1e-4, "float32, all logits", "exact"
    )
    real = recorded_routing(
        record(lm, texts, max_new_tokens=steps + 1), 0
    )  # the others: popularity elsewhere
    drawn = simulated_routing(
        lm.spec, seed, len(real.prefill), len(real.decode), CHOSEN.zipf, CHOSEN.bias
    )
    taken = {
        source: bench.decode_times(routing, STEPS, CHOSEN, N=4)
        for source, routing in (("recorded routing", real), ("popularity model", drawn))
    }
    run.table(
        "An answer on four modules, its experts with loading", tables.recorded(taken, "MoNDE")
    )
    gained = {source: of["MoNDE"] / of["+TP"] for source, of in taken.items()}
    run.metrics_of(
        {f"shipped_model_{source}": ratio for source, ratio in gained.items()},
        "+TP over MoNDE, answer, N = 4",
        "modelled",
    )
    run.takeaway(
        "Cut into {N} parts, {model} computes the same but for {apart:.1e} of its "
        "largest logit. On four modules tensor parallelism gains {gained} over MoNDE "
        "(modelled).",
        N=max(cut),
        model=lm.spec.name,
        apart=max(cut.values()),
        gained=" and ".join(
            f"**{times(ratio)}** with the {source}" for source, ratio in gained.items()
        ),
    )


def prefetching(
    run: Run, answered: Mapping[str, Sequence[Any]], spec: Any, sweep: Sweep, seed: int
) -> None:
    """Prefetching by the prompt's own counts, in the engine: `answered` is
    `dataset_free.measure`'s."""
    used, chance = dataset_free.table(answered), spec.K / spec.E
    every, (free, *calibrated) = (
        [ways for of in answered.values() for ways in of],
        dataset_free.WAYS,
    )
    _used_figure(run, used, spec, len(every))
    curve = dataset_free.hit_curve([ways[free] for ways in every], spec)
    _grown_figure(run, curve, spec)
    run.table(
        "Hit rates of the popularity model and of the engine",
        tables.hit_rates(
            {name: sweep.result(name, 6, OURS, seed) for name in MODELS},
            spec,
            used["all"][free]["hit rate"][0],
        ),
    )
    same = all(
        np.array_equal(ways[free].tokens, other.tokens) for ways in every for other in ways.values()
    )
    run.metric("answers_equal_whatever_is_resident", same, "", "exact")
    run.metrics_of(
        {f"utilisation_{way}": used["all"][way]["utilisation"][0] for way in dataset_free.WAYS},
        "of prefetched, all sources",
        "measured",
    )
    share = used["all"][free]["utilisation"][0]
    said = [_lead(way, used["all"][way]["lead"]) for way in calibrated]
    known, future, lucky = (dict(points) for points in curve.values())
    x = sorted(known)[-3]
    run.takeaway(
        "The experts most used by the prompt are used {share:.1%} of the time, chance is "
        "{chance:.1%}: the estimate of *near chance* {held} ({lift:.2f}×). {said} "
        "With {x} of {E} experts a layer prefetched {hit:.0f} % of a step's experts "
        "hit; chance is {lucky:.0f} %, knowledge of the future {future:.0f} %.",
        share=share,
        chance=chance,
        held="failed" if share > 1.25 * chance else "held",
        lift=share / chance,
        said=" ".join(said),
        x=x,
        E=spec.E,
        hit=known[x],
        lucky=lucky[x],
        future=future[x],
    )


def _used_figure(run: Run, used: Mapping[str, Any], spec: Any, prompts: int) -> None:
    chance = spec.K / spec.E
    run.figure(
        "fig6",
        bars(
            {
                "": {
                    way: {source: of[way]["utilisation"] for source, of in used.items()}
                    for way in dataset_free.WAYS
                }
            },
            "prefetched and used (%)",
            "source of the prompts",
            columns=1,
            percent=True,
            line=(chance, f"chance, K/E = {chance:.1%}"),
            kind="exact counts<br>whiskers: 95 %",
        ),
        caption=f"Share of the prefetched experts that a decode step uses, {spec.name}: {prompts} "
        f"prompts, x = K = {spec.K} of {spec.E} experts a layer (exact counts of the engine; "
        "95 % over prompts). After Fig. 6.",
        alt="Groups of three bars for each source and for all. Dataset-free and calibration on "
        "the same source are close, above chance; calibration on other sources is lower.",
    )


def _grown_figure(run: Run, curve: Mapping[str, Any], spec: Any) -> None:
    run.figure(
        "grown",
        lines(
            {"": curve},
            "a step's experts that hit (%)",
            "prefetched experts a layer, x",
            columns=1,
            at=spec.K,
            kind="exact counts<br>dashed: x = K",
        ),
        caption=f"Hit rate by number of prefetched experts, {spec.name} (exact counts, mean over "
        "prompts). The upper bound knows the answer.",
        alt="Three rising curves that meet at all experts: chance below, dataset-free above it, "
        "the upper bound clearly higher.",
    )


def _lead(way: str, lead: Any) -> str:
    """How far the prompt's own counts are ahead of another way, in words."""
    middle, low, high = (100 * value for value in lead)
    if low > 0:
        verdict = "better"
    elif high < 0:
        verdict = "worse"
    else:
        verdict = "no significant difference on these prompts"
    return f"Against *{way}*: **{middle:+.1f} points ({low:+.1f} to {high:+.1f})**, {verdict}."
