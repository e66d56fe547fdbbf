"""Plans for Neuron: the guide's rules, memory, and bounds beside a loop over parts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moelab import cards
from moelab.__main__ import main
from moelab.advice.model import Model, find_model
from moelab.advice.neuron import SIZES, WEIGHTS, NeuronPlan, plan
from moelab.base.specs import MoESpec
from moelab.static.parallelism import blocks_by_code

TRN2 = cards.load_device("trn2")
#: the layer of the guide's examples
GUIDE = MoESpec("guide", "x", 36, tuple(range(36)), 128, 8, 7168, 2048, heads=64, kv_heads=8)


def asked(spec, cores, phase="prefill", batch=1, context=8192, weights="bf16", factor=None):
    model = Model("a-model", spec, 2 * spec.vocab * spec.H * 2 + 4 * spec.H**2, "told")
    return NeuronPlan(model, TRN2, cores, phase, batch, context, weights, factor)


@pytest.mark.parametrize(
    "model, cores, phase, batch, degrees",
    [
        ("Mixtral-8x7B", 8, "prefill", 1, (8, 1)),
        ("Mixtral-8x7B", 8, "decode", 1, (8, 1)),
        ("Qwen3-30B-A3B", 16, "prefill", 1, (1, 16)),
        ("DeepSeek-V3", 64, "prefill", 1, (4, 16)),
        ("DeepSeek-V3", 64, "decode", 32, (4, 16)),  # 32 · 8 choices: NxD's all-experts
        ("DeepSeek-V3", 64, "decode", 31, (64, 1)),  # NxD has no selective loading with EP
    ],
)
def test_the_guides_examples_of_degrees(model, cores, phase, batch, degrees):
    made = plan(model, cores=cores, phase=phase, batch=batch, context=2048)
    assert (made.way.tp, made.way.ep) == degrees
    assert made.bound(phase) is not None


def test_a_phase_that_nxd_does_not_run_has_no_bound():
    made = plan("DeepSeek-V3")
    assert made.bound("decode") is None and made.bound("prefill").algorithm == "blockwise"
    assert plan("DeepSeek-V3", batch=32, context=2048).bound("decode").algorithm == "all_experts"
    assert plan("Qwen3-30B-A3B", cores=16, context=8).way.ep == 1  # 64 choices of 128 experts


def test_the_guides_block_size():
    assert asked(GUIDE, 64).block_size == 512
    assert asked(GUIDE, 64, weights="fp8").block_size == 256  # the SDK's kernel for FP8
    assert asked(GUIDE, 64, weights="mxfp4").block_size == 512
    oss = cards.load_model("GPT-OSS-120B")  # four experts a token: 256 tokens each of 8192
    assert [asked(oss, 64, context=T).block_size for T in (4096, 8192, 16384)] == [128, 256, 512]


specs = st.builds(
    lambda E, K, H, I, L, heads, kv: replace(
        GUIDE,
        num_layers=L,
        moe_layers=tuple(range(L)),
        E=E,
        K=min(K, E),
        H=64 * H,
        I=32 * I,
        vocab=32000,
        heads=heads * kv,
        kv_heads=kv,
        head_dim=64,
    ),
    st.sampled_from([1, 4, 8, 16, 32, 48, 60, 64, 128, 256]),
    st.integers(1, 8),
    st.integers(1, 64),
    st.integers(1, 256),
    st.integers(1, 40),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
)
models = st.one_of(specs, st.sampled_from([*cards.MODELS]).map(lambda name: find_model(name).spec))


@given(
    models,
    st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    st.sampled_from(["prefill", "decode"]),
    st.integers(1, 64),
    st.integers(1, 16384),
    st.sampled_from([*WEIGHTS]),
)
def test_the_rules_hold(spec, cores, phase, batch, context, weights):
    question = asked(spec, cores, phase, batch, context, weights)
    try:
        tp, ep = question.way.tp, question.way.ep
    except ValueError as error:
        assert "too many" in str(error) and cores > 1
        return
    assert tp * ep == cores and spec.E % ep == 0
    if question.nbytes > question.usable:
        assert "does not fit" in str(question.refusal())
    assert 0 <= question.padded["heads"] - spec.heads < cores
    assert question.padded["heads"] % cores == 0 == question.padded["I"] % tp
    possible = [t for t in range(1, cores + 1) if cores % t == 0 and t <= spec.I]
    possible = [t for t in possible if cores // t <= spec.E and question.allowed(t, cores // t)]
    if any(spec.I / t >= 128 for t in possible):
        assert spec.I / tp >= 128  # the guide's least, wherever a way has it
    T = batch if phase == "decode" else context
    if ep > 1 and phase == "decode":
        assert T * spec.K >= spec.E
    bound = question.bound(phase)
    assert bound.seconds == max(bound.parts.values()) == bound.parts[bound.limited_by] > 0
    for of in question.blocks:
        assert of.graph == blocks_by_code(context, spec.K, spec.E // ep, of.block_size)
        assert of.computed <= of.graph and 0 <= of.padding < 1 and of.once <= of.each * (1 + 1e-9)
    assert question.block_size in SIZES


@given(models, st.integers(0, 6), st.sampled_from(["prefill", "decode"]), st.integers(1, 64))
def test_more_cores_need_no_more_memory_each(spec, n, phase, batch):
    fewer = asked(spec, 2**n, phase, batch)
    more = replace(fewer, cores=2 ** (n + 1))
    try:
        ways = [of.memory for of in (fewer, more)]
    except ValueError:
        assume(False)
    assert all(ways[1][name] <= ways[0][name] * 1.0001 + 1 for name in ways[0])


def test_bytes_and_seconds_are_those_of_a_walk_over_the_parts():
    spec = replace(GUIDE, vocab=1000, head_dim=128, shared_I=0)
    tp, ep, cores, T = 4, 16, 64, 8192
    question = asked(spec, cores, context=T, batch=2)
    held = 0
    for _ in range(spec.L):
        for _ in range(spec.E // ep):
            held += 3 * spec.H * (spec.I // tp) * 2
    assert (question.way.tp, question.way.ep) == (tp, ep)
    memory = question.memory
    assert memory["experts"] == held
    # one KV head a core: eight of them are copied to 64 cores
    assert memory["KV cache"] == 2 * 2 * spec.L * 128 * T * 2
    compute = 0.0
    for _ in range(spec.L):
        for _ in range(spec.E // ep):
            blocks = math.ceil(T * spec.K / spec.E / 512)
            compute += blocks * 512 * 2 * 3 * spec.H * (spec.I // tp)
    dense = (question.model.others - 2 * spec.vocab * spec.H * 2) / 2 / cores
    attention = spec.L * 2 * T * T * 64 * 128 / cores  # causal, q·k and p·v
    compute += 2 * T * dense + attention
    found = question.bound("prefill")
    assert found.parts["compute"] == pytest.approx(compute / (667e12 / 4), rel=1e-3)
    read = held + question.model.dense / cores
    assert found.parts["HBM"] == pytest.approx(read / (2.9e12 / 4), rel=1e-3)
    sent = spec.L * 4 * T * spec.H * 2 * 15 / 16  # 16 chips
    assert found.parts["link"] == pytest.approx(sent / 1.28e12)
    assert asked(spec, 4).bound("prefill").parts["link"] == 0  # within a chip


def test_a_capacity_factor_computes_its_slots():
    even = asked(GUIDE, 64, factor=1.0).bound("prefill")
    more = asked(GUIDE, 64, factor=1.25).bound("prefill")
    assert even.algorithm == "capacity" and more.parts["compute"] > even.parts["compute"]
    full = plan("DeepSeek-V3", capacity_factor=32)  # E/K: nothing can be dropped
    assert full.bound("prefill").algorithm == "blockwise"


def test_what_a_cores_halves_divide():
    mixtral = cards.load_model("Mixtral-8x7B")
    assert asked(mixtral, 8).shard == "I"  # few groups, parts of 1792
    assert asked(mixtral, 64).shard == "H"  # high TP
    assert asked(GUIDE, 64).shard == "block"  # eight experts a core
    graph = asked(mixtral, 64).blocks[0]
    assert graph.computed == graph.graph  # without a dynamic loop all of them


def test_what_does_not_fit_says_what_would():
    with pytest.raises(ValueError, match="does not fit 8 cores.*Give --cores 32"):
        plan("DeepSeek-V3", cores=8)
    with pytest.raises(ValueError, match="--quantize fp8"):
        plan("Mixtral-8x7B", cores=4)
    with pytest.raises(ValueError, match="Give a smaller --batch or --context or"):
        plan("DeepSeek-V3", batch=32)
    with pytest.raises(ValueError, match="too many"):
        plan("Mixtral-8x7B", cores=100_003)
    for options, told in (
        ({"device": "m2-max"}, "no NeuronCores; give trn2"),
        ({"phase": "train"}, "prefill, decode"),
        ({"quantize": "int4"}, "bf16, fp8, mxfp4"),
        ({"batch": 0}, "1 is the least"),
    ):
        with pytest.raises(ValueError, match=told):
            plan("Mixtral-8x7B", **options)


def test_the_command_writes_json(tmp_path, capsys):
    file = tmp_path / "plan.json"
    command = ["neuron", "plan", "DeepSeek-V3", "--batch", "32"]
    assert main([*command, "--context", "2048", "--output", str(file)]) == 0
    said = capsys.readouterr().out
    assert "tp = 4, ep = 16" in said and "not run on Neuron" in said
    made, record = plan("DeepSeek-V3", batch=32, context=2048), json.loads(file.read_text())
    assert record == json.loads(json.dumps(made.record))
    assert record["kind"] == "modelled, not run on Neuron"
    assert (record["tp"], record["ep"], record["weights"]) == (4, 16, "fp8")


def test_advise_leads_here():
    from moelab import advise

    with pytest.raises(ValueError, match="moelab neuron plan Qwen3-30B-A3B --device trn2"):
        advise("Qwen3-30B-A3B", "20GB", device="trn2")


def test_the_guides_table_is_what_is_planned():
    from notebooks.studies.neuron import table

    page = Path(__file__).parents[2] / "docs" / "guide" / "neuron.md"
    assert table().strip() in page.read_text(encoding="utf-8"), "python -m notebooks.studies.neuron"
