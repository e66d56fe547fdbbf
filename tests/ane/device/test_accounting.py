"""What a plan is accounted for is what the runtime does, on a whole model: groups without tokens, single tokens."""

import numpy as np
import pytest
import torch

import moelab
from moelab.ane.device.accounting import count
from moelab.ane.plan import make_plan
from moelab.ane.runtime import prefill_through


@pytest.mark.parametrize("S", [5, 33, 48])                   # 33 tokens in chunks of 16 leave one alone
def test_the_account_is_what_the_runtime_does(S):
    model = moelab.open_model(None, dtype=torch.float32)
    spec, chunk, called = model.spec, 16, [[] for _ in range(model.spec.L)]
    even = np.full((spec.L, spec.E), 10)
    plan = make_plan(spec, even, 10 * spec.E // spec.K, chunk, group_size=2, cold_share=0.1, min_rows=0)
    with torch.no_grad(), prefill_through(model, plan, order="token") as ane:
        run = ane.executor.run

        def listening(x, ids, weights, experts):
            called[experts.layer].append(torch.bincount(ids.flatten(), minlength=spec.E).numpy())
            return run(x, ids, weights, experts)
        ane.executor.run = listening
        model(torch.arange(5, 5 + S)[None])
        total, tally, by_layer = ane.total, ane.executor.tally, ane.by_layer
    account = count(plan, np.stack(called, 1))              # [n, L, E]
    assert (account.routed.sum(), account.executed.sum(), account.slots.sum()) == (
        tally.routed, tally.executed, tally.slots)
    assert account.launches.tolist() == [layer.launches for layer in by_layer]
    chunks = -(-S // chunk)
    assert 0 < total.launches < chunks * plan.launches, "no group was without tokens: the test says nothing"
