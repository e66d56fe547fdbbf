"""Whatever a person changes on the live model: every public attribute of a decoder layer in turn, adapters, hooks, casts.

Fused kernels stand in for transformers' modules, so each change must be seen at every token: as transformers itself with
the same change, or refused by name.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from moelab import open_model
from moelab.configs import spec_from_config
from tests.depth import depth
from tests.models import sweep, tiny

pytest.importorskip("numba")

PROMPT, STEPS = torch.tensor([[5, 9, 33, 12, 60, 7, 8]]), torch.tensor([[11, 4, 71]])
#: way of opening → (dtype, options)
WAYS = {"resident": (torch.float32, {}), "in memory": (torch.float32, {"memory": 1.0}),
        "offloaded": (torch.float32, {"memory": 0.5}), "bf12": (torch.bfloat16, {"dense": "bf12"})}
NAMES = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "phimoe", "deepseek_v3", "gpt_oss", "minimax_m2", "lfm2_moe")
#: what transformers notes of a layout for others than its eager code, which does not read it
NOTES = ("training", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def wide(name):
    """Sizes that bf12 has, and all experts chosen, as a rounding could else choose others."""
    config = tiny.config(name)
    return {"hidden_size": 64, "head_dim": 16, "num_experts_per_tok": spec_from_config(config).E}


class Scaled(nn.Module):
    """A module whose output is another, as with an adapter on it."""

    def __init__(self, module):
        super().__init__()
        self.base_layer = module

    def forward(self, *args, **kwargs):
        return bigger(self.base_layer(*args, **kwargs))


def bigger(output):
    """A module's output, what is floating of it, times 1.5; a router's choice stays."""
    if isinstance(output, tuple):
        return tuple(map(bigger, output))
    return output * 1.5 if isinstance(output, torch.Tensor) and output.is_floating_point() else output


class Halved(nn.Module):
    def forward(self, w):
        return w * 0.5


@contextmanager
def attribute(module, name, value):
    """An attribute with another value."""
    before = vars(module).get(name, module)
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name) if before is module else setattr(module, name, before)


@contextmanager
def child(parent, name, change):
    before = parent._modules[name]
    setattr(parent, name, change(before))
    try:
        yield
    finally:
        setattr(parent, name, before)


@contextmanager
def hooked(register, hook):
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def weight(module, name, how):
    """A parameter or buffer that is replaced, given other memory, edited so that autograd sees it or does not."""
    held = module._parameters if name in module._parameters else module._buffers
    if hasattr(module, "shapes"):                       # of experts on disk
        setattr(module, name, nn.Parameter(torch.ones(8, 8, 8)))
    before = getattr(module, name)
    kept, other = before.detach().clone(), (before.detach().flip(0) * 1.25).contiguous()
    with torch.no_grad():
        if how == "replaced":
            setattr(module, name, nn.Parameter(other, False) if held is module._parameters else other)
        elif how == "other data":
            before.data = other
        elif how == "turned":
            before.data = before.data.mT
        elif how == "copy_":
            before.copy_(other)
        else:
            before.data.copy_(other)
    try:
        yield
    finally:
        with torch.no_grad():
            if how == "replaced":
                held[name] = before
            elif how in ("other data", "turned"):
                before.data = kept
            else:
                before.copy_(kept)


@contextmanager
def parametrized(module, name):
    parametrize.register_parametrization(module, name, Halved())
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


@contextmanager
def training(module):
    module.train()
    try:
        yield
    finally:
        module.eval()


def changes(layer):
    """(what, a function of a layer that makes the context of one change) for everything that a layer has in public."""
    for at, module in layer.named_modules():
        def of(layer, at=at):
            return layer.get_submodule(at)
        for name, value in list(vars(module).items()):
            if name.startswith("_") or name in NOTES:
                continue
            others = [not value] if isinstance(value, bool) else [value + 1, value - 1] if isinstance(value, int) else [
                value * 3, value / 3 + 1e-3] if isinstance(value, float) else []
            for other in others:
                yield f"{at}.{name} = {other}", lambda l, n=name, v=other, of=of: attribute(of(l), n, v)
        for name, held in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            for how in ("replaced", "other data", "copy_", "data.copy_", "turned"):
                if how != "turned" or held.dim() == 2 and len(set(held.shape)) == 1:
                    yield f"{at}.{name} {how}", lambda l, n=name, h=how, of=of: weight(of(l), n, h)
            if isinstance(held, nn.Parameter):
                yield f"{at}.{name} parametrized", lambda l, n=name, of=of: parametrized(of(l), n)
        for name in module._modules:
            yield f"{at}.{name} wrapped", lambda l, n=name, of=of: child(of(l), n, Scaled)
        yield f"{at} train()", lambda l, of=of: training(of(l))
        yield f"{at} forward", lambda l, of=of: attribute(of(l), "forward", lambda *a, f=of(l).forward, **k: bigger(
            f(*a, **k)))
        yield f"{at} forward hook", lambda l, of=of: hooked(of(l).register_forward_hook, lambda _m, _a, o: bigger(o))
        yield f"{at} forward pre-hook", lambda l, of=of: hooked(of(l).register_forward_pre_hook,
                                                               lambda _m, a: bigger(a))


def logits(model):
    """Of a prompt's end and a few steps."""
    with torch.no_grad():
        out = model(PROMPT, use_cache=True)
        found = [out.logits[:, -1]]
        for token in STEPS[0]:
            out = model(token[None, None], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits[:, -1])
    return torch.cat(found).float()


def close(got, wanted, dtype):
    within = {torch.float32: 1e-3, torch.bfloat16: 5e-2}[dtype]
    return bool((got - wanted).norm() <= within * wanted.norm())


def refusal(what, way, options):
    """What may be said in place of the changed result; None for nothing."""
    if ".experts." in what and "memory" in options and what.endswith((
            "replaced", "copy_", "data", "parametrized")):
        return AttributeError, "on disk|no attribute|no parameter"
    if way == "bf12" and what.endswith("data.copy_"):
        return ValueError, "edited after copies"
    return None


@pytest.mark.stress
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES[:depth(1, None)])
def test_every_attribute_of_a_layer(name, way, tmp_path):
    dtype, options = WAYS[way]
    folder, wrong, moved = tiny.save(name, tmp_path / "model", dtype, **(wide(name) if way == "bf12" else {})), [], 0
    stock = sweep.stock(folder)
    at = next(i for i in reversed(range(len(stock.model.layers))) if hasattr(stock.model.layers[i], "self_attn"))
    plain = logits(stock)
    with open_model(folder, executor="fast", **options) as lm:
        assert close(logits(lm), plain, dtype)
        for what, change in [*changes(stock.model.layers[at])]:
            try:
                with change(stock.model.layers[at]):
                    wanted = logits(stock)
            except Exception:                                   # not for transformers itself
                stock = sweep.stock(folder)
                continue
            if not wanted.isfinite().all():
                continue
            moved += not close(wanted, plain, dtype)
            try:
                with change(lm.model.layers[at]):
                    got = logits(lm)
                if not close(got, wanted, dtype):
                    wrong.append((what, float((got - wanted).norm() / wanted.norm())))
            except Exception as error:
                wrong.append((what, repr(error)[:300]))
    print(len(wrong), moved)
    assert not wrong and moved > 30
