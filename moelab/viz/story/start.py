"""The sections of notebook 00: one generation within a budget, and what other budgets would
give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.offloading.metrics import Metrics
from moelab.simulation.simulator import replay
from moelab.viz.engine_figures import budget_curve

if TYPE_CHECKING:
    from moelab.lab.results import Run

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


def generated(run: Run, spec: Any, found: Metrics, budget: int, equal: bool) -> None:
    """One warm generation: hits, bytes, time, and whether its tokens are eager's."""
    run.metric("tokens_equal_to_eager", equal, "", "exact")
    run.metric("hit_rate", found.hit_rate, "of the experts asked for", "measured")
    run.metric("read_per_token", found.read_bytes_per_token, "bytes", "measured")
    run.metric("tpot", 1e3 * found.tpot, "ms a token", "measured")
    run.takeaway(
        "With {share:.0%} of {model}'s experts in memory **{hits:.0%}** of those that "
        "were asked for were there; a token took {tpot:.3g} ms and read {read:.3g} MB. "
        "The text is {equal} transformers' own, token for token.",
        share=min(1.0, budget / spec.experts_bytes),
        model=spec.name,
        hits=found.hit_rate,
        tpot=1e3 * found.tpot,
        read=found.read_bytes_per_token / 1e6,
        equal="**equal to**" if equal else "**NOT equal to**",
    )


def budgets(run: Run, happened: Any, spec: Any) -> None:
    """The same generation, replayed by the simulator with other budgets, by a policy that could be
    had and the best."""
    expert, every = spec.expert_bytes, spec.L * spec.E
    curves = {
        policy: [
            (n * expert, of.tpot, of.hit_rate)
            for n in (max(spec.K, round(share * every)) for share in SHARES)
            for of in [replay(happened, cache=policy, pools=Pools(F=n))]
        ]
        for policy in (DEFAULT_POLICY, "belady")
    }
    run.figure(
        "budgets",
        budget_curve({DEFAULT_POLICY: curves[DEFAULT_POLICY]}, ceiling=curves["belady"]),
        caption="The generation above with other budgets, from a cache that is empty until "
        "everything fits, by the default policy and by one that knows the future (simulated; "
        f"{spec.name}).",
        alt="Two panels over the memory for experts: the time of a token falls and the hit rate "
        "rises with it; the optimum lies at or above the policy, and they meet where "
        "everything fits.",
    )
