"""Rounding that looks at data against round-to-nearest, in the norm of the inputs, and against every
scale there is on tiny groups."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from moelab.store import fewbit
from moelab.store.ggml import GGML

FORMATS = [*fewbit.FORMATS, "Q8_0", "Q4_0"]


def rounded(kind, w, moments=None) -> torch.Tensor:
    form = GGML[kind] if kind in GGML else fewbit.find_format(kind)
    blob = form.compress(w, moments)
    assert len(blob) == form.nbytes(tuple(w.shape))
    out = torch.empty_like(w)
    form.decompress(blob, out)
    return out


def errors(w, other, moments) -> torch.Tensor:
    d = (other - w).double()
    moments = moments.double()
    return ((d @ moments if moments.dim() > 1 else d * moments) * d).sum(1)


def draw(seed, R, n, tokens):
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(R, n, generator=random) * torch.rand(R, 1, generator=random)
    mix = torch.randn(n, n, generator=random) * torch.rand(n, generator=random).exp()
    x = torch.randn(tokens, n, generator=random) @ mix
    return w, x.T @ x


@given(
    st.sampled_from(FORMATS),
    st.integers(0, 2**20),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 200),
    st.booleans(),
)
def test_no_row_is_worse_than_rounded_to_nearest(kind, seed, R, groups, tokens, full):
    w, moments = draw(seed, R, 32 * groups, tokens)
    moments = moments if full else moments.diagonal().clone()
    ours, naive = (errors(w, rounded(kind, w, m), moments) for m in (moments, None))
    assert (ours <= naive * 1.0001 + 1e-9).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_feeding_errors_back_makes_products_closer(kind):
    w, moments = draw(0, 64, 128, 400)
    ours, diagonal, naive = (
        errors(w, rounded(kind, w, m), moments).sum() for m in (moments, moments.diagonal(), None)
    )
    assert ours < 0.7 * naive and ours < 0.8 * diagonal


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_gguf_that_were_fitted_are_decoded_by_gguf_py(kind):
    """And those of the transpose are the same."""
    w, moments = draw(4, 7, 96, 60)
    blob = GGML[kind].compress(w, moments)
    theirs = quants.dequantize(blob.reshape(7, -1), GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(theirs), rounded(kind, w, moments))
    assert bytes(GGML[kind].T.compress(w.mT, moments)) == bytes(blob)


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "Q4_0"])
def test_searched_scales_are_near_the_best_of_all(kind):
    """Oracle: thousands of scales of each group, the nearest codes for each."""
    w, moments = draw(1, 8, 32, 100)
    weight = moments.diagonal()
    if kind == "mxfp4":
        values = torch.tensor(sorted({*fewbit.E2M1, *(-v for v in fewbit.E2M1)}))
        scales = torch.exp2(torch.arange(-20.0, 6.0))
    else:
        values = torch.arange(-8, 8.0)
        scales = torch.linspace(-2, 2, 4000) * float(w.abs().max()) / 7
        scales = scales[scales != 0].to(torch.float16 if kind == "Q4_0" else torch.bfloat16).float()
    best = torch.full((8,), torch.inf).double()
    for scale in scales:
        codes = (w / scale)[..., None].sub(values).abs().argmin(-1)
        best = torch.minimum(best, errors(w, values[codes] * scale, weight))
    found = errors(w, rounded(kind, w, weight), weight)
    assert found.sum() <= 1.1 * best.sum()
    assert found.sum() <= errors(w, rounded(kind, w), weight).sum()


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_and_inputs_of_zero_are_rounded_too(kind):
    w, moments = draw(2, 4, 64, 50)
    w[1, :32] = 0
    for given_moments in (torch.zeros(64), torch.zeros(64, 64), moments):
        out = rounded(kind, w, given_moments)
        assert out.isfinite().all()
        assert kind == "fp8" or out[1, :32].abs().max() < 1e-30  # one scale for 128 rows
    torch.testing.assert_close(rounded(kind, w, torch.zeros(64)), w, atol=0.6, rtol=0.3)


def test_what_is_rounded_twice_stays():
    w, moments = draw(3, 8, 64, 100)
    once = rounded("int4", w.bfloat16(), moments)
    assert torch.equal(once, rounded("int4", w.bfloat16(), moments))


@pytest.mark.parametrize("text", ["int5", "auto", "auto:", "auto:x", "auto:4.5.1", "", "@12345678"])
def test_unknown_roundings_are_refused(text):
    with pytest.raises(ValueError):
        fewbit.require_rounding(text)
    for known in ("int4", "auto:4.5", "int8@12ab34cd", "auto:5@12ab34cd"):
        fewbit.require_rounding(known)
