"""The residual stream of every architecture against what hooks on its own modules see, and against
its code as read."""

from __future__ import annotations

import math

import pytest
import torch

from moelab.checkpoint.opening import spec_of
from moelab.models import discover, eager, plugged
from moelab.models.stream import check_routers, streams
from moelab.recording import record
from moelab.speculate.signals import default_vectors, quasi_hidden
from tests.checkpoint.wild import model_of, names
from tests.depth import depth, in_turn
from tests.models import tiny

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71]]
#: as read in transformers' code: norm before the router, norm after the block, and what the block's
#: output is times
READ = {
    "afmoe": ("pre_mlp_layernorm", "post_mlp_layernorm"),
    "axk1": ("post_attention_layernorm", "mlp.post_mlp_layernorm"),
    "beam": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "cohere2_moe": ("input_layernorm", None),
    "flex_olmo": (None, "post_feedforward_layernorm"),
    "jamba": ("pre_ff_layernorm", None),
    "kolibri1": ("post_attention_layernorm", "post_mlp_layernorm"),
    "lfm2_moe": ("ffn_norm", None),
    "longcat_flash": ("post_attention_layernorm.0", None),
    "nemotron_h": ("norm", None),
    "switch_transformers": ("layer_norm", None),
}
#: plain, or plain but for a factor
PLAIN = (
    "qwen3_moe",
    "deepseek_v3",
    "llama4_text",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "laguna",
)
#: whose stream is no such relation, and what the message says
REFUSED = {
    "deepseek_v4": "one residual stream|follow from its input",
    "gemma4": "neither times a factor",
    "gemma4_text": "neither times a factor",
    "hy_v4": "one residual stream",
    "inkling_text": "neither times a factor",
    "inkling2_text": "next = r [+] y",
    "minimax": "next = r [+] y",
    "qwen4_exp_text": "one residual stream|not the residual stream|next = r",
    "zaya": "follow from its input|next = r",
}


def known() -> list[str]:
    return [name for name in names() if name not in REFUSED]


def some(wanted: list[str]) -> list[str]:
    """In `make test` those that are not plain pre-norm blocks, and three that are."""
    return depth([name for name in wanted if name in {*READ, *REFUSED, *PLAIN}], wanted)


class Seen:
    """Inputs and outputs of every module of the layers that hold a MoE block, in one forward pass
    of tokens."""

    def __init__(self, model, tokens: list[int]) -> None:
        self.inputs, self.outputs, self.hooks = {}, {}, []
        self.layers = discover(model)

        def keep(module, args, kwargs, out):
            first = next((x for x in (*args, *kwargs.values()) if torch.is_tensor(x)), None)
            out = out[0] if isinstance(out, tuple) else out
            if first is not None and torch.is_tensor(out):
                self.inputs[module], self.outputs[module] = first.clone(), out.clone()

        within = {
            part for layer in self.layers for part in [*layer.experts.modules()][1:]
        }  # not called when plugged
        for module in set(model.modules()) - within:
            self.hooks.append(module.register_forward_hook(keep, with_kwargs=True))
        try:
            with torch.no_grad():
                ids = torch.tensor([tokens])
                extra = (
                    {"decoder_input_ids": ids}
                    if model.config.is_encoder_decoder
                    else {"use_cache": False}
                )
                model(input_ids=ids, **extra)
        finally:
            for hook in self.hooks:
                hook.remove()


def holder_of(model, layer):
    """The decoder layer of a block, by its name: up to the last number before the block's own
    name."""
    name = layer.name
    while not name.rpartition(".")[2].isdigit():
        name = name.rpartition(".")[0]
    return model.get_submodule(name)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal up to the rounding of the dtype, root mean square."""
    wide, other = x.double(), y.double()
    eps = torch.finfo(x.dtype if x.dtype != torch.float64 else torch.float32).eps
    return bool((wide - other).square().mean().sqrt() <= 4 * eps * other.square().mean().sqrt())


@pytest.mark.stress
@torch.no_grad()
@pytest.mark.parametrize("name, dtype", in_turn(some(known()), [torch.float32, torch.bfloat16]))
def test_norm_and_sum_are_what_the_hooks_see(name, dtype):
    """s = norm(r) bit for bit; what the layer puts out is α r + β post(v)."""
    model = model_of(name, dtype)
    around, seen, added = streams(model), Seen(model, PROMPTS[0]), {}
    hooks = [
        hook
        for i, stream in enumerate(around)
        for hook in stream.listen(lambda v, i=i: added.update({i: v}))
    ]
    Seen(model, PROMPTS[0])
    for hook in hooks:
        hook.remove()
    for layer, stream in zip(seen.layers, around):
        holder, r = holder_of(model, layer), flat(seen.inputs[stream.entry])
        assert stream.holder is holder
        assert torch.equal(stream.router_input(r), flat(seen.inputs[layer.router]))
        out = flat(seen.outputs[holder])
        assert near(stream.added(r, flat(added[layer.index])).to(out.dtype), out)
        norm, post = READ.get(name, ("post_attention_layernorm", None))
        assert stream.norm is (None if norm is None else holder.get_submodule(norm))
        assert stream.post is (None if post is None else holder.get_submodule(post))


@pytest.mark.stress
@torch.no_grad()
@pytest.mark.parametrize("name", some(known()))
def test_routed_experts_count_as_often_as_they_reach_the_sum(name):
    """Doubling the experts' output of the last MoE layer changes v by κ times it, and the layer's
    output accordingly."""
    model = model_of(name)
    stream = streams(model)[-1]
    last, routed = stream.layer.index, {}

    def times(factor):
        def execute(x, ids, weights, experts):
            out = eager(x, ids, weights, experts)
            if experts.layer == last:
                routed[factor] = out
            return factor * out if experts.layer == last else out

        return execute

    outs = {}
    for factor in (1.0, 2.0):
        added = []
        hooks = stream.listen(added.append)
        with plugged(model, times(factor)):
            seen = Seen(model, PROMPTS[0])
        for hook in hooks:
            hook.remove()
        outs[factor] = (
            flat(seen.inputs[stream.entry]),
            flat(added[0]).double(),
            flat(seen.outputs[stream.holder]),
        )
    torch.testing.assert_close(
        outs[2.0][1] - outs[1.0][1], stream.scale * routed[1.0].double(), rtol=1e-3, atol=1e-5
    )
    assert near(stream.added(outs[2.0][0], outs[2.0][1].to(torch.float32)), outs[2.0][2])


@pytest.mark.stress
@torch.no_grad()
@pytest.mark.parametrize("name", some(known()))
def test_of_one_token_default_vectors_are_exact(name):
    """They are then means over one: d_l, put through what the model does to it, gives the layer's
    true output, and r of the next MoE layer is γ times that but for what attention and dense layers
    add."""
    model = model_of(name)
    if model.config.is_encoder_decoder:
        pytest.skip("a decoder's prompt is its start token, not the encoder's")
    try:
        spec_of(model)
    except Exception as error:
        pytest.skip(f"{name} has no spec: {error}")
    with plugged(model):  # or transformers would run grouped products, which round else
        seen, vectors, trace = (
            Seen(model, [7]),
            default_vectors(model, [[7]]),
            record(model, [[7]], hidden=True),
        )
    around = streams(model)
    for i, stream in enumerate(around):
        r = trace.residuals[:, i]
        assert torch.equal(r, flat(seen.inputs[stream.entry]))
        assert torch.equal(trace.router_inputs[:, i], flat(seen.inputs[stream.layer.router]))
        d = vectors.layer_default(i, trace.ids[:, i].long(), trace.weights[:, i])
        out = flat(seen.outputs[stream.holder])
        torch.testing.assert_close(stream.added(r, d).to(out.dtype), out, rtol=1e-3, atol=1e-4)
        if i + 1 < len(around) and around[i + 1].norm is not None:
            naive = around[i + 1].carry * out
            torch.testing.assert_close(
                quasi_hidden(around[i : i + 2], r, d),
                around[i + 1].norm(naive),
                rtol=1e-2,
                atol=1e-3,
            )


def test_factors_are_those_of_the_code():
    """Residual multipliers, scaled sums and shared branches as transformers' code has them."""

    def factors(name):
        return [(s.scale, s.gain, s.keep, s.carry) for s in streams(model_of(name))]

    near = dict(rel=1e-5)
    assert factors("granitemoe")[1] == pytest.approx((1, 0.37, 1, 1), **near)
    assert factors("granitemoeshared")[1] == pytest.approx(
        (0.37, 1, 1, 1), **near
    )  # with its shared branch
    assert factors("minimax_m3_vl_text")[0] == pytest.approx((2.5, 1, 1, 1), **near)
    for i, (scale, gain, keep, carry) in enumerate(factors("beam")):
        layer = int(streams(model_of("beam"))[i].layer.name.split(".")[2])
        n = 2 * (layer + 1) + 1  # residual_add_idx of the feed-forward
        assert (scale, gain, keep) == pytest.approx(
            (2.5, 1 / math.sqrt(n), math.sqrt((n - 1) / n)), **near
        )
        if i:
            assert carry == pytest.approx(math.sqrt((n - 2) / (n - 1)), **near)


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(names())))
def test_other_streams_are_refused_by_name_and_reason(name):
    model = model_of(name)
    layer = discover(model)[0]
    for ask in (
        lambda: streams(model),
        lambda: record(model, PROMPTS, hidden=True),
        lambda: default_vectors(model, PROMPTS),
    ):
        with pytest.raises(ValueError, match=REFUSED[name]) as refusal:
            ask()
        assert type(layer.block).__name__ in str(refusal.value) or "layers." in str(refusal.value)
    assert len(record(model, PROMPTS)) == sum(map(len, PROMPTS))  # without hidden states it goes


def test_every_text_architecture_is_known_or_refused():
    assert len(known()) >= 40 and set(REFUSED) <= set(tiny.every())


@torch.no_grad()
def test_measuring_leaves_the_model_as_it_was_and_reads_no_expert():
    from moelab.models.stream import FOUND

    model = model_of("afmoe")
    vars(model).pop(FOUND, None)
    before = [
        (type(m), len(m._forward_hooks), len(m._forward_pre_hooks), m.training)
        for m in model.modules()
    ]
    logits = model(torch.tensor([PROMPTS[0]])).logits

    def supply(layer, expert):
        raise AssertionError("an expert was read")

    with plugged(model, source=supply):
        streams(model)
    assert [
        (type(m), len(m._forward_hooks), len(m._forward_pre_hooks), m.training)
        for m in model.modules()
    ] == before
    assert torch.equal(model(torch.tensor([PROMPTS[0]])).logits, logits)


@pytest.mark.stress
@torch.no_grad()
@pytest.mark.parametrize("name", some(names()))
def test_a_router_asked_by_itself_chooses_as_its_block_had_it(name):
    model = model_of(name)
    try:
        check_routers(model)
    except ValueError as error:
        assert name in ("zaya", "deepseek_v4") and "follow from its input" in str(error)
        return
    chosen = {}
    hooks = [
        layer.experts.register_forward_pre_hook(
            lambda _m, args, kwargs, i=layer.index: chosen.update(
                {i: [*args, *kwargs.values()][1:3]}
            ),
            with_kwargs=True,
        )
        for layer in discover(model)
    ]
    with plugged(model):
        seen = Seen(model, PROMPTS[0])
    for hook in hooks:
        hook.remove()
    for layer in seen.layers:
        ids, weights = layer.routing(layer.ask(seen.inputs[layer.router]))
        ran = chosen[layer.index][0] != model_E(layer)
        assert torch.equal(ids[ran], chosen[layer.index][0][ran])
        assert torch.equal(weights[ran], chosen[layer.index][1][ran])


def model_E(layer) -> int:
    return getattr(layer.experts, "num_experts", None) or layer.experts.num_routed_experts


def test_an_external_model_has_the_same_stream(tmp_path):
    """It has no experts to run, and needs none."""
    from moelab import open_model

    path = tiny.save("qwen2_moe", tmp_path)
    mine, theirs = (streams(open_model(path, experts=kind)) for kind in ("external", "resident"))
    for a, b in zip(mine, theirs, strict=True):
        assert (a.place, a.scale, a.gain, a.keep, a.carry) == (
            b.place,
            b.scale,
            b.gain,
            b.keep,
            b.carry,
        )
        assert torch.equal(a.norm.weight, b.norm.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_model_is_measured_to_its_last_layer(dtype):
    """Noise that were passed on from layer to layer would be infinite before the fiftieth."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        num_hidden_layers=50,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = Qwen3MoeForCausalLM(config).to(dtype).eval()
    check_routers(model)
    assert [
        (stream.scale, stream.gain, stream.keep, stream.carry) for stream in streams(model)
    ] == [(1, 1, 1, 1)] * 50
