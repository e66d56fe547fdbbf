"""Triton's grouped GEMM against a naive loop in fp64."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.depth import depth
from tests.experts.banks import FEW, PLAIN, make, naive
from tests.experts.test_gemv_triton import GATES, cases, relu


@pytest.mark.parametrize("kind", [*PLAIN, "bf12", *FEW])
@settings(
    max_examples=depth(1, 20),
    phases=[Phase.generate],  # an example takes a while
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_tokens_experts_equal_a_naive_loop(kind, data, triton_device):
    from moelab.experts import gemm_triton, gemv_triton

    E, K, H, I, dtype, transposed, bias, name, seed = data.draw(cases(kind))
    T = data.draw(st.sampled_from([2, 3, 7]))
    gate, activate = GATES[name], None if GATES[name] else relu
    rng = torch.Generator().manual_seed(seed)
    made = triton_device, dtype, transposed, bias
    up = make(kind, E, 2 * I if gate else I, H, *made, seed)
    down = make(kind, E, H, I, *made, seed + 1)
    x, w = torch.randn(T, H, generator=rng).to(dtype), torch.rand(T, K, generator=rng)
    ids = torch.randint(0, E + 1, (T, K), generator=rng)  # E: no expert
    banks = [gemv_triton.bank(of.of, of.table, gate) for of in (up, down)]
    there = [of.to(triton_device) for of in (x, ids, w)]
    got = gemm_triton.feed_forward(*banks, *there, activate)
    assert got.shape == x.shape and got.dtype == x.dtype
    wanted = naive(up, down, x, ids, w, gate.of if gate else relu)
    # half a bit of what is between, and in Triton's interpreter, which truncates, a whole one
    within = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]
    assert (got.cpu() - wanted).norm() <= within * wanted.norm()
    assert torch.equal(gemm_triton.feed_forward(*banks, *there, activate), got)


def test_rows_of_one_expert_in_several_blocks(triton_device):
    from moelab.experts import gemm_triton, gemv_triton

    up, down = (make("bf12", 3, R, 64, triton_device, torch.bfloat16) for R in (128, 64))
    for of in (up, down):
        of.table[2] = 0  # not there
    banks = [gemv_triton.bank(of.of, of.table) for of in (up, down)]
    ids = torch.tensor([[0, 2]] * 35 + [[3, 1]] * 2 + [[2, 2]])
    x = torch.randn(len(ids), 64).bfloat16()
    w = torch.rand(ids.shape)
    given = [of.to(triton_device) for of in (x, ids, w)]
    got = gemm_triton.feed_forward(*banks, *given).cpu()
    wanted = naive(up, down, x, ids.masked_fill(ids == 2, 3), w, GATES["silu"].of)
    assert (got - wanted).norm() <= 3e-2 * wanted.norm() and not got[-1].any()
    given[1][4, 1] = -1
    assert gemm_triton.feed_forward(*banks, *given).isnan().any(1).nonzero().tolist() == [[4]]
    if triton_device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(ValueError, match="below 0 or above E"):
        gemv_triton.check(given[0].device)
