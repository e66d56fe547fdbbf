"""The device model against the published tables, hand calculations and its own limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.ane.plan import make_plan
from moelab.ane.predict import DeviceModel, Rates
from moelab.ane.systems import SYSTEMS
from moelab.base.papers import paper
from moelab.base.specs import MoESpec
from moelab.cards import load_device, load_model
from notebooks.studies.ane_device import error, fit_table, fitted, prefill_of
from notebooks.studies.ane_popularity import assumed_counts, assumed_loads
from notebooks.studies.ane_published import TABLE_4, TABLE_5
from notebooks.studies.ane_rates import Parallel, figures, fit, leave_one_out, rms

PHI = load_model("Phi-3.5-MoE")
ULTRA = DeviceModel.of()
RATES = fit()


@pytest.mark.parametrize("device", ["m2-ultra", "m2-max"])
def test_cards_hold_what_is_fitted(device):
    found = fitted(device)
    for name, value in figures(found.rates, found.cpu).items():
        assert load_device(device)[name] == pytest.approx(value, rel=1e-5)
    assert DeviceModel.of(device).memory_bytes == found.memory_bytes


@pytest.mark.parametrize("mode, worst", [("serial", 0.07), ("parallel", 0.08)])
def test_table_5s_latencies_within_4_percent_rms(mode, worst):
    rows = [s for s in TABLE_5 if s.mode == mode]
    errors = [RATES[mode].graph_ms(s.G, s.C) / (s.G * s.C) / s.ms - 1 for s in rows]
    told = fit_table()[f"latency, {mode}"]
    assert told["RMS"] == pytest.approx(np.sqrt(np.mean(np.square(errors)))) and told["RMS"] <= 0.04
    assert told["worst"] == pytest.approx(np.abs(errors).max()) and told["worst"] <= worst
    assert told["leave-one-out RMS"] > told["RMS"]


def test_a_fit_finds_the_parameters_that_made_the_samples_and_leaving_one_out_does_not_see_it():
    serial = Rates(0.2, 3.0, 0.05, 0.02, 3.0, 0.4)
    true = {"serial": serial, "parallel": Parallel(serial, (1.5, 0.03, 0.004), 5.0, 0.2)}
    made = tuple(
        s._replace(
            ms=true[s.mode].graph_ms(s.G, s.C) / (s.G * s.C),
            mj=true[s.mode].graph_mj(s.G, s.C) / (s.G * s.C),
        )
        for s in TABLE_5
    )
    found = fit(made)
    assert vars(found["serial"]) == pytest.approx(vars(serial))
    for name in ("overlap", "power", "work"):
        assert getattr(found["parallel"], name) == pytest.approx(getattr(true["parallel"], name))
    wrong = [s._replace(ms=9.0) if s[:3] == (4, 64, "serial") else s for s in made]
    errors = leave_one_out(tuple(wrong), "latency", "serial")
    right = serial.graph_ms(4, 64) / (4 * 64)
    assert min(errors) == pytest.approx(right / 9 - 1)
    with pytest.raises(ValueError, match="3 serial samples"):
        fit([s for s in made if s.mode == "serial"][:3])


def test_the_cpu_takes_what_table_4_says():
    four_chunks = ULTRA.cpu_experts(PHI, np.full(16, 32.0), np.ones(16)) * 4
    assert (
        four_chunks.ms == pytest.approx(TABLE_4["expert FFN"][0], rel=1e-5)
        and four_chunks.cpu_ms == four_chunks.ms
    )
    assert ULTRA.cpu_experts(PHI, *np.zeros((2, 4))).ms == 0  # nothing comes, nothing is paid


def test_attention_follows_the_rates_of_experts():
    """Table 8, in the shape of a chunk of 512 in a prompt of 1024, which was chosen with Table 8 in
    view."""
    cost = ULTRA.attention(PHI, 512, 1024, "ane")
    weights, flops = 2 * 4096 * 4096 + 2 * 4096 * 1024, 2 * 4096 * 1024
    rates = ULTRA.rates
    expert = 3 * 4096 * 6400
    assert cost.ms == pytest.approx(
        rates.launch_ms
        + rates.expert_ms * weights / expert
        + 512 * rates.row_ms * (weights + flops) / expert
    )
    assert (cost.ms, cost.mj) == pytest.approx(paper("npumoe")["table_8"]["values"][:2], rel=0.05)
    assert ULTRA.attention(PHI, 512, 1024, "cpu").ms == pytest.approx(1.276 * cost.ms)


def test_a_layer_waits_for_the_slower_unit():
    counts, tokens = assumed_counts(PHI)
    plan = make_plan(PHI, counts, tokens)
    layer, loads = plan.layers[0], counts[0] * (256 / tokens)
    on_cpu = [e for group in layer.on("cpu") for e in group.experts]
    ane = sum(ULTRA.rates.graph_ms(len(g.experts), g.capacity) for g in layer.on("ane"))
    visited = -np.expm1(-loads)
    cpu = ULTRA.cpu_experts(PHI, loads[on_cpu], visited[on_cpu]).ms
    assert on_cpu and ULTRA.experts(plan, layer, loads, visited).ms == pytest.approx(max(ane, cpu))
    apart = DeviceModel.of(overlap=False).experts(plan, layer, loads, visited)
    assert apart.ms == pytest.approx(ane + cpu)


def test_a_prefill_is_its_chunks_and_layers():
    counts, tokens = assumed_counts(PHI)
    plan = make_plan(PHI, counts, tokens, system="base+TG")
    whole, one = ULTRA.prefill(plan, 1000), ULTRA.prefill(plan, 256)
    assert whole.experts.ms == pytest.approx(4 * one.experts.ms)  # the last chunk is padded
    assert one.experts.ms == pytest.approx(
        sum(
            ULTRA.rates.graph_ms(len(g.experts), g.capacity)
            for layer in plan.layers
            for g in layer.groups
        )
    )
    assert whole.attention.ms == pytest.approx(4 * 32 * ULTRA.attention(PHI, 256, 1000, "ane").ms)
    assert whole.ttft_s == pytest.approx(
        (whole.attention.ms + whole.experts.ms + whole.host.ms) / 1e3
    )
    assert error("latency") == rms(leave_one_out(TABLE_5, "latency", "serial")) < 0.07


@given(seed=st.integers(0, 99), system=st.sampled_from(("base", "npumoe")), overlap=st.booleans())
def test_padding_is_what_rows_without_a_token_take(seed, system, overlap):
    """By a loop over graphs, chunks and experts; beside experts on the CPU it takes at most
    that."""
    spec, device = load_model("Phi-tiny-MoE"), DeviceModel.of(overlap=overlap)
    loads = assumed_loads(spec, 256, 4, seed=seed)
    plan = make_plan(spec, loads.sum(0), 4 * 256, system=system)
    empty = 0.0
    for layer, came in zip(plan.layers, loads.transpose(1, 0, 2).tolist()):
        for group in layer.on("ane"):
            executed = sum(
                min(chunk[e], group.capacity) for chunk in came for e in group.experts
            ) / len(came)
            empty += group.slots - executed
            assert group.slots <= 1024
    cost, slope = (
        prefill_of(device, plan, 512, loads),
        device.rates.row_ms * spec.expert_params / (3 * 4096 * 6400),
    )
    assert (
        0 < cost.padding.ms <= 2 * empty * slope * (1 + 1e-9) and cost.padding.ms < cost.experts.ms
    )
    if not overlap or system == "base":
        assert cost.padding.ms == pytest.approx(2 * empty * slope)
    assert cost.padding.cpu_ms < cost.padding.ms and cost.padding.mj > 0


@given(
    E=st.sampled_from((4, 8, 32)),
    K=st.integers(1, 4),
    H=st.sampled_from((512, 2048, 4096)),
    I=st.sampled_from((256, 1024, 6400)),
    shared=st.sampled_from((0, 1024)),
    dense=st.sampled_from((0, 8192)),
    chunk=st.sampled_from((64, 256, 1024)),
    prompt=st.integers(1, 3000),
    system=st.sampled_from(tuple(SYSTEMS)),
    overlap=st.booleans(),
    device=st.sampled_from(("m2-ultra", "m2-max")),
    cold=st.sampled_from((0.0, 0.1, 0.9)),
    rows=st.sampled_from((0, 32, 500)),
    seed=st.integers(0, 99),
)
def test_nothing_is_busier_than_the_clock(
    E, K, H, I, shared, dense, chunk, prompt, system, overlap, device, cold, rows, seed
):
    """A bound that is beaten is a bug: CPU and ANE busy at most all the time, what is there within
    the memory."""
    spec = MoESpec(
        "random",
        "mixtral",
        3,
        (1, 2) if dense else (0, 1, 2),
        E,
        K,
        H,
        I,
        shared_I=shared,
        dense_I=dense,
        heads=16,
        kv_heads=4,
        head_dim=H // 16,
    )
    model = DeviceModel.of(device, overlap=overlap)
    loads = assumed_loads(spec, chunk, 4, "strong", seed)
    plan = make_plan(
        spec, loads.sum(0), 4 * chunk, chunk, system=system, cold_share=cold, min_rows=rows
    )
    told = prefill_of(model, plan, prompt, loads)
    for cost in (model.prefill(plan, prompt), told):
        for part in (cost.attention, cost.experts, cost.host, cost.total):
            assert 0 <= part.cpu_ms <= part.ms * (1 + 1e-9)
            assert part.mj >= 0
    assert -1e-6 <= told.padding.ms <= told.experts.ms * (1 + 1e-9)
    assert 0 <= told.dispatch_ms <= told.total.ms
    assert told.end_to_end.ms - told.total.ms == pytest.approx(
        8 * model.decode(spec, prompt).ms, abs=1e-6
    )
    assert sum(plan.memory(prompt).values()) <= model.memory_bytes


def test_a_decode_step_is_a_chunk_of_one_token_on_the_cpu():
    loads = assumed_loads(PHI, 16, 1)
    cpu = make_plan(PHI, loads[0], 16, 16, system="cpu")
    one = np.zeros((1, PHI.L, PHI.E), dtype=int)
    one[:, :, : PHI.K] = 1
    experts = ULTRA.prefill(cpu, 1, one).experts.ms
    step = ULTRA.decode(PHI, 1024)
    attention = 32 * ULTRA.attention(PHI, 1, 1024, "cpu").ms
    assert step.ms == pytest.approx(experts + attention, rel=1e-3)  # the rest is the router
    assert step.cpu_ms == step.ms
    assert ULTRA.decode(PHI, 4096).ms > step.ms


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: fitted("m4"), "'m4'.*m2-ultra"),
        (lambda: DeviceModel.of("rtx-a6000"), "not known of this device.*ane_launch_ms"),
        (
            lambda: ULTRA.require(
                make_plan(
                    load_model("Qwen3-235B-A22B"),
                    *assumed_counts(load_model("Qwen3-235B-A22B"), chunks=1),
                )
            ),
            "Apple M2 Ultra has 192 GB",
        ),
        (
            lambda: ULTRA.prefill(make_plan(PHI, *assumed_counts(PHI, 100, 2), chunk=100), 9),
            "only multiples of 16",
        ),
    ],
)
def test_bad_input_is_told(call, told):
    with pytest.raises(ValueError, match=told):
        call()
