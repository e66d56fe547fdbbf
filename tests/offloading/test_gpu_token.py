"""A GPU that runs whole tokens alone, in Triton's interpreter where there is none: what it computes, what
it keeps by which rule, and what is left of a token that ends early."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import convert, experts, open_model
from moelab import fast as kernels
from moelab.base.specs import State
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.experts import gemv
from moelab.fast import fast_decode, graphs
from moelab.fast.token import DecodeModel
from moelab.offloading import offload
from moelab.offloading.engine import Cancelled
from moelab.offloading.hybrid import Balance
from moelab.offloading.step import StepController
from moelab.simulation.simulator import replay
from tests.fast.test_graphs import NAIVE, naive_attention, naive_experts
from tests.gpus import compiled
from tests.models import tiny
from tests.offloading.links import Delayed

#: where Triton's kernels run: compiled on a GPU, or interpreted on the CPU
DEVICES = ["cuda" if torch.cuda.is_available() else "cpu"]
TOKENS = torch.randint(3, 96, (1, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """form → folder, of one bf16 model whose weights bf12 can pack."""
    folder = tmp_path_factory.mktemp("forms")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    tiny.save("qwen3_moe", folder / "model", torch.bfloat16, **sizes)
    for codec in ("raw", "bf12"):
        convert(folder / "model", folder / codec, codec=codec)
    return {form: folder / form for form in ("model", "raw", "bf12")}


def of_those_there(up, down, x, ids, w, activate=None):
    """`naive_experts` of rows with an address."""
    there = (ids < len(up.table)) & (up.table[ids.clamp(max=len(up.table) - 1), 0] != 0)
    return naive_experts(up, down, x, ids[there][None], w[there][None])


def token_by_token(up, down, x, ids, w, activate=None):
    compute = experts.gemv_triton.feed_forward
    return torch.cat([compute(up, down, *of) for of in zip(x[:, None], ids[:, None], w[:, None])])


@pytest.fixture
def opened(monkeypatch):
    """Opens a model for a device, "cpu" as if it were a GPU, and counts the tokens that it runs alone."""
    called, call = [], graphs.GraphStretch.compute
    monkeypatch.setattr(graphs.GraphStretch, "compute", lambda *of: called.append(of) or call(*of))

    def replace(package, name, of):
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", of)
        monkeypatch.setattr(package, name, of, raising=False)

    def opens(folder, memory, device, **options):
        if device == "cpu":
            for module in (graphs, gemv):
                monkeypatch.setattr(module, "GPUS", ("cpu",))
            monkeypatch.setattr(fast_decode, "KERNELS", [graphs.GraphLayer, DecodeModel])
            replace(kernels, "attention_triton", SimpleNamespace(attend=naive_attention))
            if "bf12" not in str(folder):
                naive = vars(NAIVE) | {"feed_forward": of_those_there}
                replace(experts, "gemv_triton", SimpleNamespace(**naive))
            replace(experts, "gemm_triton", SimpleNamespace(feed_forward=token_by_token))
            monkeypatch.setattr("moelab.offloading.offload.link_to", Delayed)
        called.clear()
        options = {"executor": "fast", "prefetch": "none"} | options
        return open_model(folder, memory=memory, device=device, **options)

    opens.called = called
    return opens


def decode(lm, tokens=TOKENS, prompt=6, cache=None):
    """Logits of each token after a prompt."""
    found = []
    with torch.inference_mode():
        for part in (tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)):
            out = lm(part.to(lm.device), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[0, -1].float().cpu())
    return torch.stack(found)


@pytest.fixture(scope="module")
def wanted(forms):
    with open_model(forms["model"]) as lm:
        return decode(lm)


def close(got, wanted):
    return (got - wanted).norm() < 3e-2 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "form, memory, share",
    [
        ("raw", 0.3, None),
        ("raw", 0.6, 0.5),
        ("raw", 0.3, 0),
        ("raw", 1.0, None),
        ("bf12", 0.6, None),
        ("model", 0.6, None),
    ],
)
def test_a_token_that_a_gpu_runs_alone(
    form, memory, share, device, forms, wanted, opened, monkeypatch
):
    """By the rule that a simulation of the run follows, with the host's share of the misses or not."""
    options = {}
    if share is not None:
        m = np.arange(4)  # misses of a layer
        monkeypatch.setattr(Balance, "shares", lambda of: np.tile((share * m).astype(int), (2, 1)))
        options["hybrid"] = 1
    with opened(forms[form], memory, device, **options) as lm:
        given = (TOKENS[:, 8:13], 2) if form == "bf12" else (TOKENS,)  # interpreted, it takes long
        if form == "bf12":
            with open_model(forms["model"]) as stock:
                wanted = decode(stock, *given)
        got = decode(lm, *given)
        assert close(got, wanted)
        n = len(wanted) - 2
        assert len(opened.called) == n  # by the first, it was prepared
        metrics, run = lm.moelab.metrics(), lm.moelab.run
        assert metrics.paths["token"] == n
        assert metrics.python_per_layer >= 0
        assert sum(metrics.hits.values()) + metrics.misses == sum(
            len(of) for step in run.steps for _, of in step
        )
        tokens = [event for event in run.timeline if event.resource == "host"]
        assert bool(tokens) == (share is not None)
        again = replay(run)
        assert again.counters == lm.moelab.residency.counters
        assert {*lm.moelab.engine.loader.queue.held} == {*lm.moelab.residency.resident(State.FULL)}


@pytest.mark.parametrize("device", DEVICES)
def test_who_a_cpu_computes_comes_beside_the_next_token(device, forms, opened, monkeypatch):
    """Where nothing is fetched, experts of repeated tokens are on the GPU before long, and a simulation
    of the run brings the same."""
    monkeypatch.setattr(Balance, "shares", lambda of: np.zeros((2, 4), int))
    monkeypatch.setattr(StepController, "_on_link", lambda *_: (1e-3, 2))  # two have time
    tokens = torch.cat([TOKENS[:, :7], TOKENS[:, 6:7].expand(1, 12)], 1)
    with opened(forms["raw"], 0.5, device, hybrid=1) as lm, open_model(forms["model"]) as stock:
        assert close(decode(lm, tokens), decode(stock, tokens))
        run, residency = lm.moelab.run, lm.moelab.residency
        assert any(map(list, run.predictions)) and residency.counters.away
        assert {*lm.moelab.engine.loader.queue.held} == {*residency.resident(State.FULL)}
        assert replay(run).counters == residency.counters
        pool = lm.moelab.engine.loader.pool
        assert not pool.slots.keys() & lm.moelab.engine.loader.queue.held.keys()


@given(st.data())
def test_a_gpu_decides_as_the_residency(data):
    """Random ids in a few layers, tokens one after the other, through the kernel and the rule."""
    gpu_token_triton = pytest.importorskip("moelab.offloading.gpu_token_triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    L, E, K = 2, 6, 3
    slots = data.draw(st.integers(2, 8))
    residency = Residency(L, E, Pools(F=slots), spare=data.draw(st.integers(1, slots)))
    share = data.draw(
        st.lists(st.tuples(*(st.integers(0, m) for m in range(K + 1))), min_size=L, max_size=L)
    )
    table = torch.zeros(L, E, dtype=torch.int64, device=device)

    def zeros(*of):
        return torch.zeros(of, dtype=torch.int64, device=device)

    begins = torch.arange(2 * E * 4, device=device).view(2, E, 4)
    scratch = 1000 + torch.arange(K, device=device)
    for _ in range(data.draw(st.integers(1, 3))):
        residency.begin_forward("decode", True)
        free = [slot for slot in range(1, slots + 1) if slot not in table.unique().tolist()]
        counts = torch.tensor([0, residency.free], device=device)
        homes = 100 + torch.arange(E, device=device)
        for layer in range(L):
            ids = data.draw(st.permutations(range(E + 1)))[:K]  # E: no expert
            of = gpu_token_triton.Tables(
                table=table[layer],
                home=homes,
                share=torch.tensor(share[layer], device=device),
                free=torch.tensor([*free, 0], device=device),
                scratch=scratch,
                counts=counts,
                begins=begins,
                moves=zeros(2, 4) + torch.tensor([1, 0, 1, 0], device=device),
                sizes=1 + torch.arange(E, device=device),
                rows=zeros(2, K, 4),
                jobs=zeros(3, K),
                told=zeros(2, K),
                away=zeros(K),
            )
            before = table[layer].tolist()
            gpu_token_triton.assign(torch.tensor(ids, device=device), of)
            missing = sorted(e for e in ids if e < E and not before[e])
            near = share[layer][len(missing)]
            step = residency.begin(layer, {e: 1 for e in ids if e < E}, {*missing[near:]})
            assert [e for e in of.away.tolist() if e >= 0] == [
                e for e in ids if e in missing[near:]
            ]
            where = dict(zip(ids, of.told[1].tolist()))
            for request in step.requests + step.away:
                e = request.key.expert
                assert (request.keep.name == "FULL") == (table[layer, e].item() > 0)
                assert where[e] == (before[e] or table[layer, e].item() or where[e])
                assert (where[e] == 0) == (e in missing[near:])
                assert where[e] < 1000 or request.keep.name == "MISSED"
            for k, e in enumerate(ids):
                fetched = e in missing[:near]
                assert of.jobs[:, k].tolist() == [
                    fetched * (100 + e),
                    fetched * where[e],
                    fetched * (1 + e),
                ]
                row = (
                    begins[:, e] + torch.tensor([1, 0, 1, 0], device=device) * where[e]
                    if e < E and where[e]
                    else zeros(2, 4)
                )
                assert torch.equal(of.rows[:, k], row)
        for key in residency.end_forward():
            table[key] = 0


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_fetched_to_where_they_shall_be(device):
    gpu_token_triton = pytest.importorskip("moelab.offloading.gpu_token_triton")
    block = gpu_token_triton.BLOCK
    source = torch.randint(0, 256, (4 * block,), dtype=torch.uint8, device=device)
    out = torch.zeros(5 * block, dtype=torch.uint8, device=device)
    jobs = torch.tensor(
        [
            [source.data_ptr(), 0, source.data_ptr() + 3 * block],
            [out.data_ptr() + block, 0, out.data_ptr()],
            [3, 0, 1],
        ],
        device=device,
    )
    gpu_token_triton.fetch(jobs)
    assert torch.equal(out[:block], source[3 * block :])
    assert torch.equal(out[block : 4 * block], source[: 3 * block])
    assert not out[4 * block :].any()


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_token_alone_is_not_for_goes_the_other_way(device, forms, wanted, opened):
    """Hooks, batches, exact; and back again, with another model open beside it."""
    with opened(forms["raw"], 0.6, device) as lm, opened(forms["raw"], 0.4, device) as other:
        assert close(decode(lm), wanted)
        assert len(opened.called) == 7  # the first was the step path's
        hook = lm.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
        assert close(decode(lm), wanted)
        hook.remove()
        decode(lm, TOKENS.repeat(2, 1))
        assert len(opened.called) == 7
        assert close(decode(other), wanted)
        assert close(decode(lm), wanted)
        assert len(opened.called) == 7 + 7 + 8
    with opened(forms["raw"], 0.6, device, executor="exact") as lm:
        assert close(decode(lm), wanted)
        assert not opened.called


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_ends_early_leaves_nothing(device, forms, wanted, opened, monkeypatch):
    """Cancelled between two tokens; an error after a token's layers, and within; then all is as ever."""
    with opened(forms["raw"], 0.6, device, hybrid=1) as lm:
        put, tokens = [], TOKENS[:, :6].to(lm.device)

        def hear(token):
            put.append(token)
            if len(put) == 6:
                lm.moelab.cancel()

        streamer = SimpleNamespace(put=hear, end=lambda: None)
        with pytest.raises(Cancelled):
            lm.generate(tokens, max_new_tokens=20, min_new_tokens=20, streamer=streamer)
        assert len(put) == 6 and len(opened.called) == 3
        assert close(decode(lm), wanted)

        def fail(*_):
            if len(opened.called) == 15:
                raise OSError("of the head")

        hook = lm.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="of the head"):
            decode(lm)
        hook.remove()
        opened.called.clear()
        assert close(decode(lm), wanted)
        tables = lm.moelab.engine._tables[1]
        monkeypatch.setattr(tables, "end", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decode(lm)
        lm.moelab.engine.host.worker.submit(int).result(timeout=60)  # it waits for no GPU
        opened.called.clear()
        assert close(decode(lm), wanted)
        assert len(opened.called) == 7


def test_a_host_computes_only_what_lies_there(forms, wanted, opened, monkeypatch):
    """Where some experts are on the disk only, no token runs alone."""
    of = offload.host_slots
    monkeypatch.setattr(
        offload, "host_slots", lambda store, sizes, _, *rest: of(store, sizes, 0.4, *rest)
    )
    monkeypatch.setattr(Balance, "away", lambda self, layer, tokens, there: {*tokens} - there)
    monkeypatch.setattr(Balance, "end_forward", lambda *_: None)
    with opened(forms["raw"], 0.3, "cpu", hybrid=1) as lm:
        assert close(decode(lm), wanted)
        assert lm.moelab.tiers["disk"] and not opened.called
        assert lm.moelab.residency.counters.away


def test_without_a_graph_of_the_whole_it_says_so(forms, wanted, opened, monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    with opened(forms["raw"], 0.6, "cpu") as lm:
        monkeypatch.setattr(graphs, "Graph", refuse)
        with pytest.warns(UserWarning, match="a CUDA graph a layer.*not permitted"):
            assert close(decode(lm), wanted)
        assert not opened.called
        assert lm.moelab.metrics().paths == {"layer": 8}


def test_kernels_compile_for_a_gpu(tmp_path):
    """The experts are copied by wide loads, without a mask."""
    code = """
from moelab.offloading.gpu_token_triton import Tables, assign, stamp, fetch, _fetch_kernel, _stamp_kernel
of = [torch.zeros(n, 4, dtype=torch.int64) for n in (8,) * 12]
of[0] = torch.zeros(8, dtype=torch.int64)
assign(torch.zeros(4, dtype=torch.int64), Tables(*of, torch.zeros(4, dtype=torch.int64)))
fetch(torch.zeros(3, 4, dtype=torch.int64))
_stamp_kernel[(1,)](torch.zeros(1, dtype=torch.int64), num_warps=1)
"""
    made = compiled(code, tmp_path)
    assert {*made} == {"_assign_kernel", "_fetch_kernel", "_stamp_kernel"}
    assert "ld.global.v4.b32" in made["_fetch_kernel"]
    assert "st.global.v4.b32" in made["_fetch_kernel"]
    assert "%globaltimer" in made["_stamp_kernel"]
