"""The regression across tokens: its parts against loops, and that it finds a rule which the next
token follows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.models.identity import identity
from moelab.recording import record
from moelab.speculate import next_token
from moelab.speculate.next_token import NextToken, chosen_of, coming, fit, lately, ridge
from moelab.trace import DECODE, RoutingTrace

E, K = 6, 2


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.4, 0.9]),
)
def test_what_is_coming_and_what_came_lately(lengths, seed, discount):
    ids = (
        torch.rand(sum(lengths), E + 1, generator=torch.Generator().manual_seed(seed))
        .topk(K)
        .indices
    )
    chosen, sequence = (
        chosen_of(ids, E),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    )
    y, last = coming(chosen, sequence, discount)
    u, first = lately(chosen, 3.0), 0
    for length in lengths:
        for t in range(first, first + length):
            assert bool(last[t]) == (t == first + length - 1)
            if not last[t]:
                after = [
                    min(t + 1 + i, first + length - 1) for i in range(400)
                ]  # its last token goes on
                for e in range(E):
                    assert float(chosen[t, e]) == (e in ids[t].tolist())
                    wanted = (1 - discount) * sum(
                        discount**i * float(chosen[a, e]) for i, a in enumerate(after)
                    )
                    assert float(y[t, e]) == pytest.approx(wanted, abs=1e-5)
        first += length
    for t in range(len(ids)):
        torch.testing.assert_close(
            u[t], sum(chosen[i] * 0.5 ** ((t - i) / 3) for i in range(t + 1))
        )


def test_the_ridge_is_least_squares_with_its_strength_as_rows():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.randn(60, 3, generator=generator)
    held_out = torch.arange(60) >= 48

    def naive(rows, strength):  # strength · mean square, as further rows of the problem
        extra = (strength * x[rows].double().square().sum(0).mean()).sqrt() * torch.eye(5)
        return torch.linalg.lstsq(
            torch.cat([x[rows].double(), extra]), torch.cat([y[rows].double(), torch.zeros(5, 3)])
        ).solution

    errors = [
        float((x[held_out].double() @ naive(~held_out, strength) - y[held_out]).square().sum())
        for strength in next_token.RIDGES
    ]
    wanted = naive(torch.ones(60, dtype=torch.bool), next_token.RIDGES[int(np.argmin(errors))])
    torch.testing.assert_close(ridge(x, y, held_out).double(), wanted, rtol=1e-3, atol=1e-4)


def test_it_finds_what_the_next_token_follows(tiny_model):
    """Router inputs that say which experts come next, and routing that does nothing else."""
    model = tiny_model("mixtral")
    spec, T = model.spec, 400
    ids = (
        torch.rand(T, spec.L, spec.E, generator=torch.Generator().manual_seed(0))
        .topk(spec.K)
        .indices
    )
    inputs = torch.zeros(T, spec.L, 8)
    inputs[:-1].scatter_(2, ids[1:], 1.0)
    column = torch.arange(T)
    trace = RoutingTrace(
        ids.to(torch.int16),
        torch.ones(ids.shape),
        torch.full((T,), DECODE),
        column // 40,
        column % 40,
        column,
        spec,
        identity(model),
        inputs,
        inputs,
    )
    fitted = fit(trace, discount=0.0)
    for t in range(0, 39):
        for layer in range(spec.L):
            found = fitted.expected(
                layer, inputs[t : t + 1, layer].numpy(), np.zeros(spec.E, np.float32)
            )
            assert set(np.argsort(-found)[: spec.K]) == set(ids[t + 1, layer].tolist())


def test_saved_and_loaded_and_refused(tiny_model, tmp_path):
    model = tiny_model("mixtral")
    trace = record(model, [[5, 9, 33, 12], [60, 7, 8], [11, 4], [3, 90, 17], [25, 31]], hidden=True)
    fitted = fit(trace)
    path = fitted.save(tmp_path / "n.safetensors")
    loaded, s = (
        NextToken.load(path, model),
        np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32),
    )
    assert (loaded.shape, loaded.half_life, loaded.discount) == (
        (3, model.spec.E),
        16.0,
        fitted.discount,
    )
    u = np.ones(model.spec.E, np.float32)
    assert np.array_equal(
        loaded.expected(1, s[:, : loaded.W.shape[1] - model.spec.E - 1], u),
        fitted.expected(1, s[:, : loaded.W.shape[1] - model.spec.E - 1], u),
    )
    with pytest.raises(ValueError, match="another model"):
        NextToken.load(path, tiny_model("olmoe"))
    with pytest.raises(ValueError, match="hidden=True"):
        fit(record(model, [[5, 9, 33]]))
    with pytest.raises(ValueError, match="five are the least"):
        fit(record(model, [[5, 9, 33]], hidden=True))
