"""A GPU's graphs of layers against transformers' own: with a GPU, and everywhere with naive kernels
in torch, where a graph is told anew each time. The attention kernel runs in Triton's interpreter
where there is no GPU."""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache

from moelab import experts, open_model
from moelab import fast as kernels
from moelab.experts import gemv
from moelab.fast import attention, fast_decode, graphs
from moelab.fast.token import DecodeModel
from moelab.kernels.products import KINDS
from moelab.models.patches import Patches
from moelab.models.seam import discover
from tests.depth import in_turn
from tests.models import tiny

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
NAMES = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "phimoe")


def at(address, dtype, *shape):
    """The CPU's memory there."""
    n = torch.Size(shape).numel()
    memory = (ctypes.c_char * (n * dtype.itemsize)).from_address(int(address))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def naive_attention(q, k, v, cos, sin, where, scaling):
    (heads, D), (keys, values, S, stride) = q.shape, where.tolist()
    cos, sin = cos.view(D), sin.view(D)
    out = torch.empty_like(q)
    for h in range(len(k)):
        skip = h * stride * q.element_size()
        K, V = (at(address + skip, q.dtype, S, D) for address in (keys, values))
        K[-1], V[-1] = turned(k[h].float(), cos, sin), v[h]
        for head in range(heads // len(k) * h, heads // len(k) * (h + 1)):
            scores = K.float() @ turned(q[head].float(), cos, sin) * scaling
            out[head] = torch.softmax(scores, 0) @ V.float()
    return out


NAIVE = SimpleNamespace(
    multiplies=lambda of: of.kind is KINDS[torch.bfloat16],
    bank=lambda of, table, gate: SimpleNamespace(table=table, R=of.R, gate=gate),
    feed_forward=lambda *given: naive_experts(*given),
    check=lambda device: None,
)


def naive_experts(up, down, x, ids, w, activate=None):
    if len(x) > 1:
        parts = zip(x[:, None], ids[:, None], w[:, None])
        return torch.cat([naive_experts(up, down, *part) for part in parts])
    total, (H, I) = 0, (x.shape[1], up.R // 2)
    for expert, of in zip(ids[0].tolist(), w[0]):
        if expert == len(up.table):  # no expert
            continue
        into = at(up.table[expert, 0], x.dtype, 2 * I, H).float()
        back = at(down.table[expert, 0], x.dtype, H, I).float()
        gate, value = (x.float() @ into.T).chunk(2, -1)
        total = total + of * (F.silu(gate) * value) @ back.T
    return torch.as_tensor(total).expand(x.shape).to(x.dtype)


@pytest.fixture
def opened(monkeypatch):
    """Opens a model for a device, "cpu" as if it were a GPU, and counts the calls of its graphs."""
    called, call = [], graphs.Graph.__call__
    monkeypatch.setattr(graphs.Graph, "__call__", lambda graph: called.append(graph) or call(graph))

    def opens(folder, device, **options):
        if device == "cpu":
            monkeypatch.setattr(graphs, "GPUS", ("cpu",))
            monkeypatch.setattr(gemv, "GPUS", ("cpu",))
            monkeypatch.setattr(fast_decode, "KERNELS", [graphs.GraphLayer, DecodeModel])
            for package, name, of in (
                (kernels, "attention_triton", SimpleNamespace(attend=naive_attention)),
                (experts, "gemv_triton", NAIVE),
                (experts, "gemm_triton", NAIVE),
            ):
                monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", of)
                monkeypatch.setattr(package, name, of, raising=False)
        lm = open_model(folder, device=device, **options)
        called.clear()
        return lm

    opens.called = called
    return opens


def decode(lm, tokens, cache=None):
    """Logits of each token after a prompt of six."""
    cache, found = cache or DynamicCache(config=lm.config), []
    with torch.inference_mode():
        for part in (tokens[:, :6], *tokens[:, 6:].split(1, 1)):
            out = lm(part.to(lm.device), past_key_values=cache, use_cache=True)
            found.append(out.logits[0, -1].float().cpu())
    return torch.stack(found), cache


def drawn(n, seed=0):
    return torch.randint(3, 96, (1, n), generator=torch.Generator().manual_seed(seed))


def close(got, wanted, dtype):
    within = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    return (got.float() - wanted.float()).norm() <= within * wanted.float().norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "of, memory",
    in_turn([*((name, torch.bfloat16) for name in NAMES), ("mixtral", torch.float32)], [None, 0.5]),
)
def test_tokens_are_those_of_transformers(of, memory, device, opened, tmp_path, monkeypatch):
    name, dtype = of
    monkeypatch.setattr(attention, "GROWTH", 3)  # so the cache moves now and then
    folder, tokens = tiny.save(name, tmp_path / "model", dtype), drawn(14)
    with open_model(folder, device=device) as lm:
        wanted, theirs = decode(lm, tokens)
    with opened(folder, device, memory=memory, executor="fast") as lm:
        for _ in range(2):  # another generation, another cache
            got, ours = decode(lm, tokens)
            assert close(got, wanted, dtype)
        calls, L = len(opened.called), lm.config.num_hidden_layers
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert a.keys.shape == b.keys.shape
        assert close(a.keys, b.keys, dtype) and close(a.values, b.values, dtype)
    if name == "phimoe":  # its norms are others
        assert not calls
    elif memory and device == "cuda":  # by the first token, it was prepared
        assert calls == 8 * 2 + L - 1
    elif device == "cpu" and (memory or dtype != torch.bfloat16):
        assert calls == 2 * 8 * L
    else:  # all layers at once, dense ones and shared experts, too
        assert calls == 2 * 8


@pytest.mark.parametrize("device", DEVICES)
def test_who_listens_hears_what_was_chosen_and_may_keep_it(device, opened, tmp_path):
    folder, tokens, found = tiny.save("mixtral", tmp_path / "model", torch.bfloat16), drawn(12), []
    for executor, opens in (("exact", open_model), ("fast", opened)):
        with opens(folder, device=device, executor=executor) as lm, Patches() as patches:
            heard = []
            for layer in discover(lm):
                layer.listen(patches, lambda ids, w, i=layer.index: heard.append((i, ids, w)))
            decode(lm, tokens)
            found.append([(i, ids.cpu(), w.float().cpu()) for i, ids, w in heard])
    assert len(opened.called) == 6
    for (i, ids, w), (j, others, theirs) in zip(*found, strict=True):
        a, b = (torch.zeros(len(ids), 8).scatter(1, *of) for of in ((ids, w), (others, theirs)))
        assert i == j and torch.allclose(a, b, atol=3e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_what_is_not_exactly_this_takes_its_own_way(name, device, opened, tmp_path):
    """Hooks, batches, other settings and weights, of one layer and of all, which stay alike."""

    def change(lm, which):
        for layer in lm.model.layers[which]:
            layer.mlp.gate.top_k, layer.self_attn.scaling = 1, 3 * layer.self_attn.scaling
            weight = layer.mlp.gate.weight.detach().flip(0).contiguous()
            layer.mlp.gate.weight = torch.nn.Parameter(weight, requires_grad=False)

    folder, tokens = tiny.save(name, tmp_path / "model", torch.bfloat16), drawn(8)
    with opened(folder, device, executor="fast") as lm, open_model(folder, device=device) as stock:
        wanted, layers = decode(lm, tokens)[0], lm.model.layers
        assert (calls := len(opened.called)) >= 2
        for part in (layers[1].self_attn, layers[0].input_layernorm, layers[1].self_attn.q_proj):
            opened.called.clear()
            hook = part.register_forward_hook(lambda *_: None)
            assert close(decode(lm, tokens)[0], wanted, torch.bfloat16)
            assert len(opened.called) < max(calls, 2 * len(layers))
            hook.remove()
        opened.called.clear()
        decode(lm, tokens.repeat(2, 1))
        assert not opened.called
        for which in (slice(1, 2), slice(None)):
            change(lm, which), change(stock, which)
            got, theirs = decode(lm, tokens)[0], decode(stock, tokens)[0]
            assert close(got, theirs, torch.bfloat16) and not close(got, wanted, torch.bfloat16)


def test_experts_of_nobody_are_not_asked_where_they_are(tmp_path):
    with (
        open_model(
            tiny.save("mixtral", tmp_path / "model", torch.bfloat16),
            experts="external",
            executor="fast",
        ) as lm,
        open_model(tmp_path / "model") as resident,
    ):
        got, wanted = (decode(of, drawn(9))[0] for of in (lm, resident))
        assert close(got, wanted, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])  # one call, and one for each layer
def test_threads_take_turns(name, device, opened, tmp_path):
    with opened(tiny.save(name, tmp_path / "model", torch.bfloat16), device, executor="fast") as lm:
        texts = [drawn(30, seed) for seed in range(4)]
        alone, interval = [decode(lm, tokens)[0] for tokens in texts], sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(4) as pool:
                together = list(pool.map(lambda tokens: decode(lm, tokens)[0], texts))
        finally:
            sys.setswitchinterval(interval)
    assert all(close(a, b, torch.bfloat16) for a, b in zip(together, alone))
    assert not close(*alone[:2], torch.bfloat16)


@pytest.mark.parametrize(
    "sizes, dtype",
    in_turn([(8, 2, 64, 1), (4, 4, 48, 700), (20, 1, 16, 130)], [torch.float32, torch.bfloat16]),
)
def test_attention_equals_a_naive_one(sizes, dtype, triton_device):
    from moelab.fast import attention_triton

    heads, kv_heads, D, S = sizes
    rng, device = torch.Generator().manual_seed(S), triton_device

    def drawn(*shape):
        return torch.randn(shape, generator=rng).to(device, dtype)

    q, k, v = drawn(heads, D), drawn(kv_heads, D), drawn(kv_heads, D)
    memory, angle = drawn(2, kv_heads, S + 5, D), 6 * torch.rand(D // 2, generator=rng).repeat(2)
    cos, sin, before = angle.cos().to(q), angle.sin().to(q), memory.clone()
    keys, values = memory
    where = [keys.data_ptr(), values.data_ptr(), S + 1, memory.stride(1)]
    where = torch.tensor(where, device=device)
    got = attention_triton.attend(q, k, v, cos, sin, where, D**-0.5)

    within = 1e-5 if dtype == torch.float32 else 2**-7
    keys, values = before.double()
    keys[:, S], values[:, S] = turned(k.double(), cos, sin), v.double()
    assert torch.allclose(memory.double()[0, :, S], keys[:, S], rtol=within, atol=within)
    assert torch.equal(memory[1, :, S], v)
    memory[:, :, S] = before[:, :, S]
    assert torch.equal(memory, before)  # nothing else was written
    for head, x in enumerate(turned(q.double(), cos, sin)):
        h = head // (heads // kv_heads)
        p = torch.softmax(keys[h, : S + 1] @ x * D**-0.5, 0)
        wanted = p @ values[h, : S + 1]
        assert torch.allclose(got[head].double(), wanted, rtol=within, atol=2 * within)
