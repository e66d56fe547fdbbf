"""The residual stream of every architecture against what hooks on its own modules see."""

from __future__ import annotations

import pytest
import torch

from moelab.models import plugged
from moelab.models.patches import Patches
from moelab.models.stream import AROUND, PLAIN, streams
from moelab.recording import record
from moelab.speculate.signals import default_vectors, quasi_hidden
from tests.checkpoint.wild import model_of, names
from tests.depth import depth, in_turn

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71]]
#: whose stream is no such relation, or whose router wants more than its input
REFUSED = (
    *("beam", "deepseek_v4", "gemma4", "gemma4_text", "hy_v4", "inkling_text", "inkling2_text"),
    *("minimax", "qwen4_exp_text", "zaya"),
)
#: those that are not plain, by the beginning of their layers' names
LISTED = tuple(name.lower() for name in AROUND if name not in PLAIN)


def some() -> list[str]:
    """In `make test` those that are not plain pre-norm layers, and three that are."""
    known = [name for name in names() if name not in REFUSED]
    few = [
        n
        for n in known
        if n in ("qwen3_moe", "deepseek_v3", "gpt_oss") or n.replace("_", "").startswith(LISTED)
    ]
    return depth(few, known)


class Seen:
    """Inputs and outputs of every module around the MoE blocks, in one forward pass of tokens; and
    what `streams` hears of it."""

    def __init__(self, model, tokens: list[int]) -> None:
        self.inputs, self.outputs, self.added = {}, {}, {}
        self.streams = streams(model)

        def keep(module, args, kwargs, out):
            given = next((x for x in (*args, *kwargs.values()) if torch.is_tensor(x)), None)
            out = out[0] if isinstance(out, tuple) else out
            if given is not None and torch.is_tensor(out):
                self.inputs[module], self.outputs[module] = flat(given).clone(), flat(out).clone()

        modules = {m for s in self.streams for m in (s.entry, s.layer.router, s.holder)}
        ids = torch.tensor([tokens])
        given = "decoder_input_ids" if model.config.is_encoder_decoder else "use_cache"
        with Patches() as patches, torch.no_grad():
            for module in modules:
                patches.hook(module.register_forward_hook, keep, with_kwargs=True)
            for i, stream in enumerate(self.streams):
                stream.listen(patches, lambda v, i=i: self.added.update({i: flat(v).clone()}))
            model(input_ids=ids, **{given: ids if given != "use_cache" else False})


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal up to the rounding of the dtype, root mean square."""
    wide, other = x.double(), y.double()
    eps = torch.finfo(x.dtype if x.dtype != torch.float64 else torch.float32).eps
    return bool((wide - other).square().mean().sqrt() <= 4 * eps * other.square().mean().sqrt())


@torch.no_grad()
@pytest.mark.parametrize("name, dtype", in_turn(some(), [torch.float32, torch.bfloat16]))
def test_norm_router_and_sum_are_what_the_hooks_see(name, dtype):
    """s = norm(r) and the router asked alone bit for bit; the layer puts out r + post(v)."""
    model = model_of(name, dtype)
    seen = Seen(model, PROMPTS[0])
    for stream, v in zip(seen.streams, seen.added.values()):
        r, out = seen.inputs[stream.entry], seen.outputs[stream.holder]
        assert torch.equal(stream.router_input(r), seen.inputs[stream.layer.router])
        assert near(stream.added(r, v).to(out.dtype), out)


@torch.no_grad()
@pytest.mark.parametrize("name", some()[:: depth(3, 1)])
def test_of_one_token_default_vectors_are_exact(name):
    """They are then means over one: d_l, put through what the model does to it, gives the layer's
    true output, and r of the next MoE layer is that but for what attention and dense layers add."""
    model = model_of(name)
    if model.config.is_encoder_decoder:
        pytest.skip("a decoder's prompt is its start token, not the encoder's")
    with plugged(model):  # or transformers would run grouped products, which round else
        seen, vectors = Seen(model, [7]), default_vectors(model, [[7]])
        trace = record(model, [[7]], hidden=True)
    for i, stream in enumerate(seen.streams):
        r, out = trace.residuals[:, i], seen.outputs[stream.holder]
        assert torch.equal(r, seen.inputs[stream.entry])
        assert torch.equal(trace.router_inputs[:, i], seen.inputs[stream.layer.router])
        d = vectors.layer_default(i, trace.ids[:, i].long(), trace.weights[:, i])
        torch.testing.assert_close(stream.added(r, d).to(out.dtype), out, rtol=1e-3, atol=1e-4)
        after = seen.streams[i + 1 : i + 2]
        if after and after[0].norm is not None:
            naive = after[0].norm(out)
            quasi = quasi_hidden([stream, *after], r, d)
            torch.testing.assert_close(quasi, naive, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "name, scale",
    [("granitemoe", 0.37), ("laguna", 2.5), ("minimax_m3_vl_text", 2.5), ("cohere2_moe", 0.5)],
)
def test_factors_are_those_of_the_code(name, scale):
    """Residual multipliers, scaled sums and shared branches as transformers' code has them."""
    assert streams(model_of(name))[0].scale == scale


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(names())))
def test_other_streams_are_refused_by_name(name):
    model = model_of(name)
    for ask in (streams, lambda model: record(model, PROMPTS, hidden=True)):
        with pytest.raises(ValueError, match="AROUND"):
            ask(model)
    assert len(record(model, PROMPTS)) == sum(map(len, PROMPTS))  # without hidden states it goes
