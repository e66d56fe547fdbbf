"""An expert in N parts gives what the whole expert gives, for every layout, and the parts are what
was promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from notebooks.studies.ndp_tensor_parallel import NDPTensorParallel
from tests.experts.toy import LAYOUTS, make_experts, make_routing, naive


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    N=st.integers(1, 7),
    I=st.integers(1, 19),
    T=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_parts_sum_to_the_whole(layout, N, I, T, seed):
    experts = make_experts(5, 6, I, layout, seed=seed)
    ids, weights = make_routing(T, 5, 2, 0.5, seed)
    ids[0, 0] = 5 if seed % 3 == 0 else ids[0, 0]  # "no expert"
    x = torch.randn(T, 6, generator=torch.Generator().manual_seed(seed))
    executor = NDPTensorParallel(N)
    assert torch.allclose(
        executor(x, ids, weights, experts).double(), naive(x, ids, weights, experts), atol=2e-5
    )
    assert executor.tally.routed == executor.tally.executed == int((ids < 5).sum())


@pytest.mark.parametrize("N", [2, 3, 4])
def test_a_unit_computes_only_from_its_own_columns(N):
    """Columns, columns, rows by hand: unit u's partial sum needs nothing of the others' shares."""
    I, H = 11, 6
    experts = make_experts(3, H, I)
    x, ids, w = torch.randn(4, H), torch.tensor([[1], [1], [1], [1]]), torch.ones(4, 1)
    found = NDPTensorParallel(N).partial_sums(x, ids, w, experts)
    gate_up, down = experts.module.gate_up_proj[1], experts.module.down_proj[1]
    h = torch.nn.functional.silu(x @ gate_up[:I].T) * (x @ gate_up[I:].T)  # [4, I]
    ends = [u * I // N for u in range(N + 1)]
    assert found.shape == (N, 4, H)
    for u, (a, b) in enumerate(zip(ends, ends[1:])):
        assert b - a in (I // N, I // N + 1)
        assert torch.allclose(found[u], h[:, a:b] @ down[:, a:b].T, atol=1e-5)


def test_a_norm_behind_the_expert_is_refused():
    experts = make_experts(2, 4, 4)
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="normalises"):
        NDPTensorParallel(2)(torch.ones(1, 4), torch.tensor([[0]]), torch.ones(1, 1), experts)
