"""Whatever a person changes on the live model: every public attribute of a decoder layer, adapters,
hooks, casts.

Fused kernels stand in for transformers' modules, so each change must be seen at every token: as
transformers itself with the same change, or refused by name."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from moelab import open_model
from moelab.base.configs import spec_from_config
from tests.depth import depth, in_turn
from tests.models import sweep, tiny
from tests.models.test_architectures import RUN

pytest.importorskip("numba")

PROMPT, STEPS = torch.tensor([[5, 9, 33, 12, 60, 7, 8]]), torch.tensor([[11, 4, 71]])
#: way of opening → (dtype, options)
WAYS = {
    "resident": (torch.float32, {}),
    "in memory": (torch.float32, {"memory": 1.0}),
    "offloaded": (torch.float32, {"memory": 0.5}),
    "bf12": (torch.bfloat16, {"dense": "bf12"}),
}
NAMES = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "phimoe",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "lfm2_moe",
)
#: what transformers notes of a layout for others than its eager code, which does not read it
NOTES = (
    "training",
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_transposed",
    "is_concatenated",
)


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
    return (
        output * 1.5 if isinstance(output, torch.Tensor) and output.is_floating_point() else output
    )


class Halved(nn.Module):
    def forward(self, w):
        return w * 0.5


@contextmanager
def attribute(module, name, value):
    """An attribute, or a child, with another value."""
    missing = object()
    before = module._modules.get(name, vars(module).get(name, missing))
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name) if before is missing else setattr(module, name, before)


@contextmanager
def hooked(register, hook):
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def weight(module, name, how):
    """A parameter or buffer that is replaced, given other memory, edited so that autograd sees it
    or does not."""
    held = module._parameters if name in module._parameters else module._buffers
    before = getattr(module, name)
    kept, other = before.detach().clone(), (before.detach().flip(0) * 1.25).contiguous()
    with torch.no_grad():
        if how == "replaced":
            setattr(
                module, name, nn.Parameter(other, False) if held is module._parameters else other
            )
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
    """(what, a function of a layer that makes the context of one change) for everything that a
    layer has in public."""
    for at, module in layer.named_modules():

        def of(layer, at=at):
            return layer.get_submodule(at)

        for name, value in list(vars(module).items()):
            if name.startswith("_") or name in NOTES:
                continue
            others = (
                [not value]
                if isinstance(value, bool)
                else [value + 1, value - 1]
                if isinstance(value, int)
                else [value * 3, value / 3 + 1e-3]
                if isinstance(value, float)
                else []
            )
            for other in others:
                yield (
                    f"{at}.{name} = {other}",
                    lambda l, n=name, v=other, of=of: attribute(of(l), n, v),
                )
        for name, held in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            for how in ("replaced", "other data", "copy_", "data.copy_", "turned"):
                if how != "turned" or held.dim() == 2 and len(set(held.shape)) == 1:
                    yield f"{at}.{name} {how}", lambda l, n=name, h=how, of=of: weight(of(l), n, h)
            if isinstance(held, nn.Parameter):
                yield f"{at}.{name} parametrized", lambda l, n=name, of=of: parametrized(of(l), n)
        for name in module._modules:
            yield (
                f"{at}.{name} wrapped",
                lambda l, n=name, of=of: attribute(of(l), n, Scaled(of(l)._modules[n])),
            )
        yield f"{at} train()", lambda l, of=of: training(of(l))
        yield (
            f"{at} forward",
            lambda l, of=of: attribute(
                of(l),
                "forward",
                lambda *a, f=of(l).forward, **k: bigger(f(*a, **k)),  # noqa: B008
            ),
        )
        yield (
            f"{at} forward hook",
            lambda l, of=of: hooked(of(l).register_forward_hook, lambda _m, _a, o: bigger(o)),
        )
        yield (
            f"{at} forward pre-hook",
            lambda l, of=of: hooked(of(l).register_forward_pre_hook, lambda _m, a: bigger(a)),
        )


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


def refused(what, way, error):
    """Whether an error is a refusal by name of a change that cannot be honoured."""
    said = str(error)
    if way == "bf12":
        return "cannot be edited" in said
    return ".experts." in what and ("no attribute" in said or "not have a parameter" in said)


def opened(name, way, folder):
    """(transformers' own model, the way's folder and options, its dtype)."""
    dtype, options = WAYS[way]
    tiny.save(name, folder, dtype, **(wide(name) if way == "bf12" else {}))
    return sweep.stock(folder), {"source": folder, "executor": "fast", **options}, dtype


PAIRS = [
    (name, way)
    for name, way in in_turn(NAMES[: depth(4, None)], list(WAYS))
    if way != "bf12" or name in NAMES[:4]
]


@pytest.mark.parametrize("name, way", PAIRS)
def test_every_attribute_of_a_layer_is_seen_or_refused_by_name(name, way, tmp_path):
    stock, options, dtype = opened(name, way, tmp_path)
    at, wrong, moved = len(stock.model.layers) - 1, [], 0
    at -= not hasattr(stock.model.layers[at], "self_attn")
    plain, every = logits(stock), [*changes(stock.model.layers[at])]
    with open_model(**options) as lm:
        assert close(logits(lm), plain, dtype)
        for what, change in every[PAIRS.index((name, way)) :: depth(18, 1)]:
            try:
                with change(stock.model.layers[at]):
                    wanted = logits(stock)
            except Exception:  # transformers cannot compute so, and may be left half changed
                stock = sweep.stock(tmp_path)
                continue
            moved += not close(wanted, plain, dtype)
            try:
                with change(lm.model.layers[at]):
                    got = logits(lm)
                if wanted.isfinite().all() and not close(got, wanted, dtype):
                    wrong.append(what)
            except Exception as error:
                if not refused(what, way, error):
                    wrong.append((what, error))
        assert wrong == [] and moved > depth(2, 60)
        assert close(logits(lm), plain, dtype)


def adapted(model, modules=(), parameters=None):
    """An adapter of PEFT that makes a difference."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4,
            lora_alpha=32,
            target_modules=list(modules),
            target_parameters=parameters,
            init_lora_weights=False,
        ),
    ).eval()


def merged(model):
    """`weight.data += …`, of which autograd knows nothing."""
    return adapted(model, ["q_proj", "v_proj"]).merge_and_unload()


def switched_off(model):
    made = adapted(model, ["q_proj", "o_proj"])
    on = logits(made)
    made.base_model.disable_adapter_layers()
    assert not torch.equal(logits(made), on)
    return made


def pruned(model):
    for layer in model.model.layers:
        prune.l1_unstructured(layer.self_attn.q_proj, "weight", 0.5)
        nn.utils.parametrizations.weight_norm(layer.self_attn.o_proj)


def ties(model):
    """Each router scores its experts alike in pairs, so between two of them its own code
    decides."""
    for layer in model.model.layers:
        if (gate := getattr(layer.mlp, "gate", None)) is not None:
            gate.weight.data[1::2] = gate.weight.data[::2]


def compiled(model):
    """A layer in place, a part in another's place, and the whole."""
    layers = model.model.layers
    layers[0].compile(backend="eager")
    layers[1].self_attn = torch.compile(layers[1].self_attn, backend="eager")
    return torch.compile(model, backend="eager")


#: what a person does to a whole model → (how, the ways in which it is refused, and what is said)
DONE = {
    # ikawrakow/ik_llama.cpp issue 1986, unslothai/unsloth issue 2142, vllm-project/vllm pull
    # request 11810
    "attention's adapter": (
        lambda m: adapted(m, ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]),
        (),
        "",
    ),
    # unslothai/unsloth pull request 5345, vllm-project/vllm pull request 41384
    "experts' adapter": (
        lambda m: adapted(m, (), ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("in memory", "offloaded"),
        "target_parameters",
    ),
    "router's adapter": (lambda m: adapted(m, (), ["mlp.gate.weight"]), (), ""),
    "merged adapter": (merged, ("bf12",), "kept as bf12 cannot be edited"),
    "adapter taken off": (lambda m: adapted(m, ["q_proj"]).unload(), (), ""),
    # vllm-project/vllm pull request 11810
    "adapter switched off": (switched_off, (), ""),
    "edited head": (
        lambda m: [m.lm_head.weight.data.mul_(2)] and None,  # noqa: SIM223
        ("bf12",),
        "kept as bf12 cannot be edited",
    ),
    # pytorch/pytorch issue 128061
    "compiled": (compiled, (), ""),
    # arcee-ai/mergekit issue 111
    "top_k": (
        lambda m: [setattr(layer.mlp.gate, "top_k", 1) for layer in m.model.layers] and None,
        (),
        "",
    ),
    "bf16": (lambda m: m.bfloat16(), (), ""),
    "fp64": (lambda m: m.double(), (), ""),
    "train": (lambda m: m.train(), (), ""),
    "another attention": (lambda m: m.set_attn_implementation("eager"), (), ""),
    "pruned": (pruned, (), ""),
    "ties": (ties, (), ""),
    "larger": (lambda m: [torch.manual_seed(0), m.resize_token_embeddings(100)] and None, (), ""),  # noqa: SIM223
}


@pytest.mark.parametrize("what, way", in_turn(list(DONE), list(WAYS)))
def test_what_is_done_to_a_model_is_done(what, way, tmp_path):
    done, where, said = DONE[what]
    stock, options, dtype = opened("mixtral", way, tmp_path)

    def after(model):
        made = done(model)
        return logits(model if made is None else made)

    wanted = after(stock)
    with open_model(**options) as lm:
        logits(lm)  # used before, as a person does
        if way in where:
            with pytest.raises(ValueError, match=said):
                after(lm)
        else:
            assert close(after(lm), wanted, torch.bfloat16 if what == "bf16" else dtype)


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj"]])
@pytest.mark.parametrize("way", ["resident", "offloaded"])
def test_a_saved_adapter_of_the_experts_is_put_on_them_or_refused(way, modules, tmp_path):
    """PEFT leaves out, without a word, what it does not find. unslothai/unsloth pull request
    5345."""
    peft = pytest.importorskip("peft")
    stock, options, dtype = opened("mixtral", way, tmp_path)
    torch.manual_seed(1)
    parameters = None if modules == "all-linear" else ["experts.gate_up_proj", "experts.down_proj"]
    trained = peft.get_peft_model(
        stock,
        peft.LoraConfig(
            r=4,
            lora_alpha=32,
            init_lora_weights=False,
            target_modules=modules,
            target_parameters=parameters,
        ),
    ).eval()
    wanted = logits(trained)
    trained.save_pretrained(tmp_path / "adapter")
    with open_model(**options) as lm:
        adapted = peft.PeftModel.from_pretrained(lm, tmp_path / "adapter").eval()
        if way == "resident":
            assert close(logits(adapted), wanted, dtype)
        else:
            with pytest.raises(ValueError, match="for the experts, too.*without memory="):
                logits(adapted)


@pytest.mark.parametrize(
    "part, way",
    in_turn(
        ["self_attn", "mlp", "mlp.gate", "mlp.experts", "input_layernorm"],
        ["resident", "offloaded"],
    ),
)
def test_a_class_with_another_forward(part, way, tmp_path, monkeypatch):
    """As kernels of others are put on: for all modules of a class, after opening."""
    stock, options, dtype = opened("mixtral", way, tmp_path)
    with open_model(**options) as lm:
        plain, cls = logits(lm), type(stock.model.layers[0].get_submodule(part))
        own = cls.forward
        monkeypatch.setattr(cls, "forward", lambda self, *a, **k: bigger(own(self, *a, **k)))
        wanted = logits(stock)
        assert close(logits(lm), wanted, dtype) and not close(plain, wanted, dtype)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_an_experts_class_with_another_forward_opens_nothing(name, tmp_path, monkeypatch):
    """transformers does not dispatch it by name any more, so nobody knows what it computes."""
    stock, options, dtype = opened(name, "offloaded", tmp_path)
    modules = dict(stock.named_modules())
    experts = type(next(modules[path] for path in modules if path.endswith(".experts")))
    own = experts.forward
    monkeypatch.setattr(experts, "forward", lambda self, *a, **k: 2 * own(self, *a, **k))
    with pytest.raises(ValueError, match=f"{experts.__name__} .*may compute anything"):
        open_model(**options)


HOW = {
    "exact": {},
    "fast": {"executor": "fast"},
    "offloaded": {"memory": 0.5},
    "offloaded fast": {"memory": 0.5, "executor": "fast"},
}


def everything(model):
    return [*model.train().requires_grad_(True).parameters()]


def norm(model):
    return [model.requires_grad_(False).model.layers[0].input_layernorm.weight.requires_grad_(True)]


def head(model):
    return [model.requires_grad_(False).lm_head.weight.requires_grad_(True)]


@pytest.mark.parametrize("of, how", in_turn([everything, norm, head, "embeddings"], list(HOW)))
def test_gradients_are_transformers_own_or_refused(of, how, tmp_path):
    """huggingface/accelerate issue 3770: a loss that is right, and gradients of another model."""
    found = []
    tiny.save("mixtral", tmp_path)
    with open_model(tmp_path, **HOW[how]) as lm:
        for model in (sweep.stock(tmp_path), lm):
            if of == "embeddings":
                given = model.requires_grad_(False).get_input_embeddings()(PROMPT)
                leaves = [given.requires_grad_(True)]
                loss = model(inputs_embeds=given, labels=PROMPT).loss
            else:
                leaves = of(model)
                loss = model(PROMPT, labels=PROMPT).loss
            if model is lm and how != "exact" and of is not head:
                with pytest.raises(RuntimeError, match="inference only"):
                    loss.backward()
            else:
                loss.backward()
                found.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    if len(found) == 2:
        assert len(found[0]) == len(found[1]) > 0
        assert all(torch.allclose(*pair, rtol=1e-3, atol=1e-5) for pair in zip(*found))


@pytest.mark.parametrize("memory", [None, 0.5])
def test_batches_of_prompts_have_transformers_bits(memory, tmp_path):
    """Its head reads the last token of each prompt, which do not lie beside each other."""
    folder = tiny.save("qwen3_moe", tmp_path, hidden_size=64)
    stock, ids = sweep.stock(folder), torch.randint(3, 96, (4, 9))
    with open_model(folder, memory=memory) as lm, torch.no_grad():
        assert torch.equal(*(model(ids, logits_to_keep=1).logits for model in (stock, lm)))


OFFLOADED = [
    name for name in RUN if sweep.table()["architectures"][name]["fp32"]["offload"] == "exact"
]


@pytest.mark.parametrize(
    "name, how",
    in_turn(depth(["minimax_m2", "lfm2_moe", "hy_v3"], OFFLOADED), ["fast", "offloaded fast"]),
)
def test_every_architecture_decodes_with_fast(name, how, tmp_path):
    """Routers that take a bias of their block's, too: ml-explore/mlx-lm issue 1883,
    NVIDIA/TensorRT-LLM pull request 13294."""
    tiny.save(name, tmp_path)
    with open_model(tmp_path, **HOW[how]) as lm:
        tokens, found = sweep.generate(lm)
    expected, wanted = sweep.generate(sweep.stock(tmp_path))
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
