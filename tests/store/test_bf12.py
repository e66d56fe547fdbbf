"""bf12 gives every bit back, whatever it is given, and experts in it are computed like those of the
checkpoint."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moelab
from moelab.store import bf12
from moelab.store.codecs import compress_tensor, decompress_tensor
from moelab.store.layout import StoreError


def naive(blob, nbytes):
    """The weights of a blob, one after the other, by its description."""
    n, tail = nbytes // 128 * 64, nbytes % 128
    table, low, codes = blob[48:64], blob[64 : 64 + n], blob[64 + n : 64 + n + n // 2]
    words = []
    for i in range(n):
        code = codes[i // 64 * 32 + i % 32]
        words.append(low[i] | table[code >> 4 if i % 64 >= 32 else code & 15] << 8)
    rest = blob[64 + n + n // 2 : len(blob) - tail]
    m = len(rest) // 6
    for index, value in zip(
        np.frombuffer(rest, np.uint32, m), np.frombuffer(rest, np.uint16, m, 4 * m)
    ):
        words[index] = value
    return np.array(words, np.uint16).tobytes() + blob[len(blob) - tail :]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=700), st.integers(1, 256))
def test_any_bytes_come_back(data, values):
    data = bytes(byte % values for byte in data)
    blob, out = bf12.pack(data), bytearray(len(data))
    bf12.unpack(blob, out)
    assert out == data == naive(blob, len(data))


def test_all_bit_patterns_heavy_tails_zeros_and_denormals():
    rng = np.random.default_rng(0)
    every = rng.permutation(1 << 16).astype(np.uint16)
    usual = (
        torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .view(torch.uint16)
        .numpy()
    )
    tails = torch.from_numpy(rng.standard_cauchy(1 << 16)).bfloat16().view(torch.uint16).numpy()
    pruned = np.where(rng.random(1 << 16) < 0.7, 0, usual)
    for words in (
        every,
        usual,
        tails,
        pruned,
        every >> 9,
        np.zeros(64, np.uint16),
        np.full(128, 0x7FC1, np.uint16),
    ):
        words, out = words.astype(np.uint16), np.empty(len(words), np.uint16)
        bf12.unpack(bf12.pack(words), out)
        assert np.array_equal(out, words)
    assert len(bf12.pack(usual)) < 0.76 * usual.nbytes


def test_the_triton_kernel(triton_device):
    from moelab.store import bf12_triton

    words = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)[:8192]
    usual = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    for w in (
        torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).view(64, 128),
        usual,
        0 * usual,
    ):
        blob, w = (
            torch.frombuffer(bytearray(bf12.pack(w)), dtype=torch.uint8).to(triton_device),
            w.to(triton_device),
        )
        out = bf12_triton.unpack(blob, torch.full_like(w, torch.nan))
        assert torch.equal(out.view(torch.int16), w.view(torch.int16))
    with pytest.raises(ValueError, match="bf12 blob"):
        bf12_triton.unpack(blob[:-3], out)
    with pytest.raises(ValueError, match="whole blocks"):
        bf12_triton.unpack(blob, torch.empty(3, 5, dtype=torch.bfloat16, device=triton_device))


def test_what_does_not_fit_stays_raw():
    def stored(w):
        packed, out = compress_tensor(w, "bf12"), torch.empty_like(w)
        decompress_tensor(packed, out)
        assert torch.equal(out.view(torch.uint8), w.view(torch.uint8))
        return [plane.codec for plane in packed.planes]

    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    assert stored(w.bfloat16()) == ["bf12"]
    any_bits = torch.randint(-1 << 15, 1 << 15, (64, 128), dtype=torch.int16).view(torch.bfloat16)
    assert stored(w.bfloat16()[:, :96].contiguous()) == [
        "bf12"
    ]  # rows of no whole blocks: only stored so
    for other in (w, w.half(), w.bfloat16()[0], w.bfloat16()[:3, :96].contiguous(), any_bits):
        assert stored(other) == ["raw"]


@given(st.integers(0, 3000), st.integers(0, 40))
def test_a_blob_of_an_impossible_length_is_refused(length, blocks):
    nbytes, least = 128 * blocks, 64 + 96 * blocks
    if length >= least and (length - least) % 6 == 0 and (length - least) // 6 <= 64 * blocks:
        assert bf12.escapes(length, nbytes) == (length - least) // 6
    else:
        with pytest.raises(ValueError, match="bytes"):
            bf12.escapes(length, nbytes)


def test_escapes_out_of_place_are_refused():
    words = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    blob = bytearray(bf12.pack(words))
    first = 64 + 3 * len(words) // 2
    for value in (1 << 16, (1 << 32) - 1):
        damaged = blob[:]
        damaged[first : first + 4] = value.to_bytes(4, "little")
        with pytest.raises(ValueError, match="order"):
            bf12.unpack(damaged, np.empty_like(words))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return moelab.convert(None, tmp_path_factory.mktemp("bf12") / "small", codec="bf12")


@pytest.mark.parametrize("memory", [0.2, 0.6, 1.0])
def test_the_small_model_computes_the_same(store, memory):
    resident = moelab.open_model()
    batch = resident.tokenizer("The key of the red box is", return_tensors="pt")
    with torch.inference_mode():
        expected = resident(**batch).logits
        text = resident.generate(**batch, max_new_tokens=6, do_sample=False)
        with moelab.open_model(store, memory=memory) as lm:
            assert torch.equal(lm(**batch).logits, expected)
            assert torch.equal(lm.generate(**batch, max_new_tokens=6, do_sample=False), text)
            assert lm.moelab.engine.pipeline.slots.sizes.in_place
        with moelab.open_model(store, memory=memory, executor="fast") as lm:
            assert (lm(**batch).logits - expected).abs().mean() < 0.05 * expected.abs().mean()
            asked = lm.moelab.engine.pipeline.slots.matrices([0, 1], 0, [3, 4])
            assert {codec for codec, _ in asked.values()} == {"bf12"}


def test_stored_bytes_and_a_damaged_chunk(store):
    experts = [
        entry for layer in store.layers for entries in layer.experts for entry in entries.values()
    ]
    assert {codec for entry in experts for codec, _ in entry.planes} == {"bf12"}
    assert sum(entry.stored() for entry in experts) < 0.77 * sum(entry.nbytes for entry in experts)
    chunk = store.entries(0, 0)["down_proj"].planes[0][1][0]
    file = store.folder / store.layers[0].file
    content = file.read_bytes()
    try:
        file.write_bytes(
            content[: chunk.offset]
            + bytes([content[chunk.offset] ^ 1])
            + content[chunk.offset + 1 :]
        )
        with (
            pytest.raises(StoreError, match="checksum"),
            moelab.open_model(store, memory=0.5) as lm,
        ):
            lm(torch.arange(3, 60)[None])
    finally:
        file.write_bytes(content)
