"""Triton's GEMV against a naive loop in fp64."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moelab.experts import gemv
from moelab.experts.executor import gate_of
from moelab.kernels.gates import SILU, Gate
from tests.depth import depth
from tests.experts import toy
from tests.experts.banks import FEW, PLAIN, make, naive
from tests.gpus import compiled

GPT_OSS = Gate(True, 1.702, 7.0, 1.0)
GATES = {"silu": SILU, "clamped": Gate(limit=0.5), "gpt-oss": GPT_OSS, "relu": None}


@st.composite
def cases(draw, kind):
    """Sizes, layout, biases, gate: of packed kinds whole blocks of 64."""
    sizes = st.integers(1, 40) if kind in PLAIN else st.sampled_from([64, 128])
    few = [*PLAIN.values()] if kind in FEW else [PLAIN.get(kind, torch.bfloat16)]
    return (
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 3, 16])),
        draw(sizes),
        draw(sizes),
        draw(st.sampled_from(few)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([*GATES])),
        draw(st.integers(0, 99)),
    )


def relu(h):
    return h.relu().square()


@pytest.mark.parametrize("kind", [*PLAIN, "bf12", *FEW])
@settings(
    max_examples=depth(2, 20),
    phases=[Phase.generate],  # an example takes a while
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_tokens_experts_equal_a_naive_loop(kind, data, triton_device):
    from moelab.experts import gemv_triton

    E, K, H, I, dtype, transposed, bias, name, seed = data.draw(cases(kind))
    gate, activate = GATES[name], None if GATES[name] else relu
    rng = torch.Generator().manual_seed(seed)
    given = triton_device, dtype, transposed, bias
    up = make(kind, E, 2 * I if gate else I, H, *given, seed)
    down = make(kind, E, H, I, *given, seed + 1)
    x, w = torch.randn(1, H, generator=rng).to(dtype), torch.rand(1, K, generator=rng)
    ids = torch.randint(0, E + 1, (1, K), generator=rng)  # E: no expert
    assert all(map(gemv_triton.multiplies, (up.of, down.of)))
    banks = [gemv_triton.bank(of.of, of.table, gate) for of in (up, down)]
    got = gemv_triton.feed_forward(*banks, *(of.to(triton_device) for of in (x, ids, w)), activate)
    wanted = naive(up, down, x, ids, w, gate.of if gate else relu)
    assert got.shape == x.shape and got.dtype == x.dtype
    within = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert (got.cpu() - wanted).norm() <= within * wanted.norm()


@pytest.mark.parametrize("kind", ["bfloat16", "bf12", "int4"])
def test_addresses_of_zero_and_ids_beyond(kind, triton_device):
    from moelab.experts import gemv_triton

    up, down = (
        make(kind, 3, R, 64, triton_device, torch.bfloat16, bias=True, seed=R) for R in (128, 64)
    )
    for table in (up.table, down.table):
        table[1] = 0
        table[1, 3] = 5  # of a row that is not there, whatever else it has
    banks = [gemv_triton.bank(of.of, of.table) for of in (up, down)]
    x, w = torch.randn(1, 64).bfloat16().to(triton_device), torch.ones(3, device=triton_device)

    def run(*ids):
        ids = torch.tensor([ids]).to(triton_device)
        return gemv_triton.feed_forward(*banks, x, ids, w[None, : ids.shape[1]])

    assert torch.equal(run(0, 1, 2), run(0, 3, 2)) and not run(1, 1).any()
    gemv_triton.check(x.device)
    for wrong in (-1, 4, 10**12, -(2**63)):
        assert run(0, wrong).isnan().all()
        if x.is_cuda:
            torch.cuda.synchronize()
        with pytest.raises(ValueError, match="below 0 or above E"):
            gemv_triton.check(x.device)
        gemv_triton.check(x.device)


@pytest.mark.parametrize("dtype", PLAIN.values(), ids=str)
@pytest.mark.parametrize("layout", toy.LAYOUTS)
def test_any_experts_of_a_module(layout, dtype, triton_device, monkeypatch):
    monkeypatch.setattr(gemv, "GPUS", (triton_device,))
    E, H, I, K = 5, 24, 20, 3
    experts = toy.make_experts(E, H, I, layout, dtype)
    experts.module.to(triton_device)
    executor = gemv.GEMV()
    for ids in ([[4, 0, 2]], [[1, 2, 3], [4, 0, 2]]):
        ids, w = torch.tensor(ids), torch.rand(len(ids), K).to(dtype)
        x = torch.randn(len(ids), H, generator=torch.Generator().manual_seed(1)).to(dtype)
        given = (of.to(triton_device) for of in (x, ids, w))
        got = executor(*given, experts).cpu()
        experts.module.cpu()
        wanted = toy.naive(x, ids, w, experts)
        experts.module.to(triton_device)
        within = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]
        assert got.dtype == dtype and (got - wanted).norm() <= within * wanted.norm()
    assert executor.tally.executed == 3 * K
    gates = {
        "ungated": None,
        "ungated bias": None,
        "clamped": Gate(limit=10),
        "interleaved": Gate(True, 1.702, 7, 1.0),
    }
    assert gate_of(experts) == gates.get(layout, SILU)


@pytest.mark.parametrize("wrong", [-1, 7, 10**12])
def test_ids_of_no_expert_are_refused(wrong, triton_device, monkeypatch):
    monkeypatch.setattr(gemv, "GPUS", (triton_device,))
    experts = toy.make_experts(6, 16, 16)
    experts.module.to(triton_device)
    x, w = torch.randn(1, 16, device=triton_device), torch.ones(1, 2, device=triton_device)
    ids = torch.tensor([[0, wrong]], device=triton_device)
    executor = gemv.GEMV()
    with pytest.raises(ValueError, match="expert"):
        assert executor(x, ids, w, experts).isnan().all()
        torch.cuda.synchronize()
        executor(x, ids.clamp(0, 6), w, experts)
    assert executor(x, ids.clamp(0, 6), w, experts).isfinite().all()


COMPILED = """
from moelab.experts import gemm_triton, gemv_triton
from moelab.store import bf12, fewbit, unpack_triton
from tests.experts.banks import FEW, PLAIN, make

for kind in KINDS:
    dtype = PLAIN.get(kind, torch.bfloat16)
    for transposed in {False, kind not in FEW}:
        given = "cpu", dtype, transposed, True
        made_ = [make(kind, 3, *of, *given) for of in ((128, 128), (128, 64))]
        up, down = (gemv_triton.bank(of.of, of.table) for of in made_)
        x, w = torch.zeros(300, 128, dtype=dtype), torch.ones(300, 2)
        ids = torch.zeros(300, 2, dtype=torch.int64)
        for T in (2, 300):
            gemm_triton.feed_forward(up, down, x[:T], ids[:T], w[:T])
        gemv_triton.feed_forward(up, down, x[:1], ids[:1], w[:1])
    if kind not in PLAIN:
        codec = bf12.CODEC if kind == "bf12" else fewbit.find_format(kind)
        w = torch.linspace(-1, 1, 64 * 128).view(64, 128).bfloat16()
        blob = bf12.pack(w) if kind == "bf12" else codec.compress(w)
        unpack_triton.unpack(codec, torch.from_numpy(blob), w)
"""


@pytest.mark.parametrize("capability", depth([89], [80, 89, 90]))
def test_kernels_compile_for_a_gpu(capability, tmp_path):
    kinds = depth(("int4",), (*PLAIN, "bf12", *FEW))
    made = compiled(COMPILED.replace("KINDS", repr(kinds)), tmp_path, capability)
    assert {"_multiply_kernel", "_grouped_kernel", "_combine_kernel", "_unpack_kernel"} <= {*made}
    assert "ld.global.v4.b32" in made["_multiply_kernel"]  # 16 bytes a lane
    assert "mma" in made["_grouped_kernel"]
