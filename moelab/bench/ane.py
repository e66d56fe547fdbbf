"""Planning for the Apple Neural Engine, and its device model beside NPUMoE's figures; needs no Mac.

Times of planning are CPU time, measured; counts are exact for an assumed popularity; all else is
modelled."""

from __future__ import annotations

import time

from moelab import claims
from moelab.ane.device.comparison import modelled, studies
from moelab.ane.device.device_model import DeviceModel
from moelab.ane.plan import ANEPlan, count, make_plan
from moelab.ane.popularity import SKEWS, assumed_counts, assumed_loads
from moelab.cards import load_model
from moelab.records import Record, Records


def run(skew: str = "typical", mode: str = "serial") -> Records:
    device = DeviceModel.of(mode=mode)
    models = studies(skew=skew, mode=mode)
    found, notebook = models["Phi-3.5-MoE"], "06_ane_conversion"
    metrics = {
        name: dict(zip(("value", "unit", "kind", "readings"), of))
        for name, of in modelled(models, skew=skew, mode=mode).items()
    }
    asked = [claim for claim in claims.ledger() if claim.metric[:1] == (notebook,)]
    answers = [row for row in claims.rows(asked, own={notebook: metrics}) if row.ours is not None]
    return {
        "fit to Table 5, relative errors (modelled)": device.fit_table(),
        "fitted parameters": {
            name: {"value": figure.value, "unit": figure.unit, "source": figure.source}
            for name, figure in (device.rates.figures() | device.cpu.figures()).items()
        },
        "PhiMoE, ours (modelled)": {
            f"P={prompt}, B={chunk}": {
                "TTFT, s": p.ttft_s,
                "mJ a token": p.mj_per_token,
                "CPU busy, s": p.cpu_s,
                "slots a token": p.slots_per_token,
            }
            for (prompt, chunk), run in found.items()
            for p in [run["npumoe"]]
        },
        "published figures beside them (paper, modelled)": {
            row.claim.id: {
                "paper": row.claim.said,
                "modelled": row.ours,
                "verdict": row.verdict,
                "why": row.why,
                "source": row.claim.where,
            }
            for row in answers
        },
        f"plans from cards, popularity assumed: {skew}": {
            name: planned(name, skew) for name in ("Phi-3.5-MoE", "Phi-tiny-MoE", "Qwen3-30B-A3B")
        },
    }


def plan_card(
    name: str, skew: str = "typical", group_size: int = 8, seed: int = 0
) -> tuple[ANEPlan, float]:
    """A card's plan for chunks of 256, and the seconds of CPU time that it took."""
    spec = load_model(name)
    counts, tokens = assumed_counts(spec, 256, skew=skew, seed=seed)
    start = time.process_time()
    plan = make_plan(spec, counts, tokens, group_size=group_size, popularity=f"assumed: {skew}")
    return plan, time.process_time() - start


def planned(name: str, skew: str) -> Record:
    """A card's plan for chunks of 256 in figures; drops and padding on chunks that it was not made
    from."""
    plan, took = plan_card(name, skew)
    account = count(plan, assumed_loads(plan.spec, 256, 128, skew)[64:])
    return {
        "CPU ms to plan": 1e3 * took,
        "launches a chunk": plan.launches,
        "rows a chunk": plan.slots,
        "experts on the CPU": plan.cpu_experts,
        "largest graph, MB": plan.largest_graph_bytes / 1e6,
        "dropped": account.drop_rate,
        "padded": account.padded_fraction,
        "does not fit": "; ".join(plan.problems) or "–",
    }


KIND = "modelled"
OPTIONS = {
    "skew": ({"choices": SKEWS}, "assumed popularity"),
    "mode": (
        {"choices": ("serial", "parallel")},
        "launches of a layer's graphs; Table 4's expert FFN fits serial",
    ),
}
