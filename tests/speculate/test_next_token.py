"""The regression across tokens: its parts against loops, and that it finds a rule which the next
token follows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.models.identity import identity
from moelab.recording import record
from moelab.speculate import next_token
from moelab.speculate.next_token import chosen_of, coming, fit, lately, ridge
from moelab.trace import DECODE, RoutingTrace


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.4, 0.9]),
)
def test_what_is_coming_and_what_came_lately(lengths, seed, discount):
    E, generator = 6, torch.Generator().manual_seed(seed)
    ids = torch.rand(sum(lengths), E + 1, generator=generator).topk(2).indices
    chosen = chosen_of(ids, E)
    assert chosen.tolist() == [[float(e in row) for e in range(E)] for row in ids.tolist()]
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    (y, last), u, first = coming(chosen, sequence, discount), lately(chosen, 3.0), 0
    for length in lengths:
        end = first + length - 1
        assert last[first : end + 1].tolist() == [False] * (length - 1) + [True]
        for t in range(first, end):  # a sequence's last token goes on
            wanted = sum(discount**i * chosen[min(t + 1 + i, end)] for i in range(300))
            torch.testing.assert_close(y[t], (1 - discount) * wanted, rtol=1e-4, atol=1e-5)
        first += length
    for t in range(len(ids)):
        uses = sum(chosen[i] * 0.5 ** ((t - i) / 3) for i in range(t + 1))
        torch.testing.assert_close(u[t], uses)


def test_the_ridge_is_least_squares_with_its_strength_as_rows():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.randn(60, 3, generator=generator)
    extra = (next_token.PRIOR * x.double().square().mean()).sqrt() * torch.eye(5)
    wide = torch.cat([x.double(), extra]), torch.cat([y.double(), torch.zeros(5, 3)])
    wanted = torch.linalg.lstsq(*wide).solution
    torch.testing.assert_close(ridge(x, y).double(), wanted, rtol=1e-3, atol=1e-4)


def test_it_finds_what_the_next_token_follows(tiny_model):
    """Router inputs that say which experts come next, and routing that does nothing else."""
    model, T = tiny_model("mixtral"), 400
    spec, t = model.spec, torch.arange(T)
    scores = torch.rand(T, spec.L, spec.E, generator=torch.Generator().manual_seed(0))
    ids = scores.topk(spec.K).indices
    inputs = torch.zeros(T, spec.L, 8)
    inputs[:-1].scatter_(2, ids[1:], 1.0)
    columns = ids.to(torch.int16), torch.ones(ids.shape), torch.full((T,), DECODE)
    trace = RoutingTrace(*columns, t // 40, t % 40, t, spec, identity(model), inputs, inputs)
    fitted, nothing = fit(trace, discount=0.0), np.zeros(spec.E, np.float32)
    for t in range(39):
        for layer in range(spec.L):
            found = fitted.expected(layer, inputs[t : t + 1, layer].numpy(), nothing)
            assert set(np.argsort(-found)[: spec.K]) == set(ids[t + 1, layer].tolist())


def test_traces_without_inputs_are_refused(tiny_model):
    model, prompts = tiny_model("mixtral"), [[5, 9, 33, 12], [60, 7, 8]]
    with pytest.raises(ValueError, match="hidden=True"):
        fit(record(model, prompts))
