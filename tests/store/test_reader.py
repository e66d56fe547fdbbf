"""Reading: the bits of every tensor in every mode, buffers, throttling, and errors that say
where."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from moelab.store import reader as reading
from moelab.store.codec import RAW
from moelab.store.layout import Chunk, ExpertFiles, ExpertStore, StoreError, TensorEntry, run
from moelab.store.reader import (
    Reader,
    StoreExperts,
    aligned_buffer,
    decode,
    empty_tensors,
    modes,
)
from tests.store.test_writer import expert, write


@pytest.fixture()
def store(tmp_path):
    return ExpertStore(write(tmp_path))


def equal(tensors, layer, index):
    truth = expert(layer, index)
    assert set(tensors) == set(truth)
    for name, t in tensors.items():
        assert (
            t.dtype == truth[name].dtype and torch.equal(t, truth[name]) and t.data_ptr() % 64 == 0
        ), name


@pytest.mark.parametrize("mode", modes())
def test_every_part_in_every_mode(store, mode):
    with Reader(store, mode) as reader:
        buffers = {part: reader.buffer(part) for part in ("E", "SM", "both")}
        for layer in range(2):
            for index in range(3):
                parts = {part: reader.read(layer, index, part, buffers[part]) for part in buffers}
                equal(decode(parts["both"], parts["both"]), layer, index)
                out = empty_tensors(parts["E"].entries)
                equal(decode(parts["E"], parts["SM"], out), layer, index)
                assert all(
                    chunks.data.base is not None for chunks in parts.values()
                )  # no new memory
        lengths = [
            sum(run(store.entries(i, e), part)[1] for i in range(2) for e in range(3))
            for part in buffers
        ]
        assert reader.bytes_read == sum(lengths) and lengths[0] + lengths[1] == lengths[2]


def test_the_source_of_the_seam_from_several_threads(store):
    source = StoreExperts(store, mode="buffered")

    def work(seed):
        for i in np.random.default_rng(seed).integers(0, 6, 30).tolist():
            equal(source(i // 3, i % 3), i // 3, i % 3)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def test_file_systems_that_refuse_direct_reads_are_read_buffered(store, monkeypatch):
    real = os.preadv
    monkeypatch.setattr("moelab.store.reader.modes", lambda: ["direct", "buffered"])
    monkeypatch.setattr(reading.os, "O_DIRECT", 0, raising=False)
    calls = []

    def refuse(fd, views, offset):
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    with Reader(store, "direct") as reader:
        chunks = reader.read(1, 1)
        assert reader.mode == "buffered"
        equal(decode(chunks, chunks), 1, 1)


def test_short_reads_are_continued(store, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:1000]], offset))
    with Reader(store, "buffered") as reader:
        chunks = reader.read(0, 2)
        equal(decode(chunks, chunks), 0, 2)


class Plain(ExpertFiles):
    """One expert of one tensor, which lies anywhere in a file, to be read anywhere."""

    aligned, checksum = False, None

    def __init__(self, file, offset, at, length):
        planes = ((RAW, (Chunk(at, length, ""),)),)
        entries = {"w": TensorEntry("U8", (length,), "", planes)}
        self.layers = [SimpleNamespace(experts=[entries])]
        self.folder, self._extent = file.parent, (file, offset, slice(at, at + length))

    def stored_bytes(self, layer, expert, part):
        return len(range(*self._extent[2].indices(1 << 40)))

    def extents(self, parts):
        file, offset, at = self._extent
        yield file, offset, [memoryview(parts[0].data[at])]


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    path = tmp_path_factory.mktemp("noise") / "noise.bin"
    path.write_bytes(np.random.default_rng(0).bytes(4 << 20))
    return path


SIZES = st.sampled_from([0, 1, 2, 511, 512, 513, 4095, 4096, 4097]) | st.integers(0, 3 << 20)


@pytest.mark.parametrize("mode", modes())
@given(offset=SIZES, at=st.integers(0, 4095), length=SIZES)
@example(offset=700, at=700, length=1 << 20)  # as it lies in its blocks
@example(offset=512, at=0, length=512)
@example(offset=1, at=513, length=511)
def test_what_lies_unaligned_is_read_in_every_mode(noise, mode, offset, at, length):
    whole = noise.read_bytes()
    assume(length)
    with Reader(Plain(noise, offset, at, length), mode) as reader:
        memory = reader.buffer()
        memory[:] = 7
        if offset + length <= len(whole):
            reader.read(0, 0, buffer=memory)
            assert memory[at : at + length].tobytes() == whole[offset : offset + length]
            assert (memory[:at] == 7).all() and (memory[at + length :] == 7).all()
        else:
            with pytest.raises(StoreError, match=f"cut off at byte {max(offset, len(whole)):,}"):
                reader.read(0, 0, buffer=memory)


@pytest.mark.parametrize("mode", modes())
def test_a_file_that_is_cut_off(store, mode):
    file, (offset, _) = store.folder / store.layers[1].file, run(store.entries(1, 2), "both")
    with open(file, "r+b") as f:
        f.truncate(offset + 4096)
    with Reader(store, mode) as reader:
        reader.read(1, 1)
        with pytest.raises(
            StoreError,
            match=f"{file.name} is cut off at byte {offset + 4096:,}.*expert 2 of MoE layer 1",
        ):
            reader.read(1, 2)


def test_errors_of_the_system_say_where(store, monkeypatch):
    def broken(fd, views, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    where = f"experts-00001.safetensors at byte {run(store.entries(1, 2), 'SM')[0]:,}"
    what = "SM chunks of expert 2 of MoE layer 1.*Input/output"
    with Reader(store, "buffered") as reader:
        with pytest.raises(OSError, match=f"{where} .*{what}") as caught:
            reader.read(1, 2, "SM")
    assert caught.value.errno == errno.EIO


def test_damage_is_named_before_anything_is_decoded(store):
    chunk = store.entries(0, 1)["wide"].planes[2][1][0]
    with open(store.folder / store.layers[0].file, "r+b") as f:
        f.seek(chunk.offset + 5)
        f.write(b"\x00\xff\x00")
    with Reader(store, "buffered") as reader:
        reader.read(0, 1, "E")  # not what was asked for
        with pytest.raises(StoreError, match=f"chunk 0.1.wide.p2.0 .*{chunk.offset:,}.*checksum"):
            reader.read(0, 1, "SM")
    with Reader(store, "buffered", verify=False) as reader:
        assert reader.read(0, 1, "SM")


def test_bandwidth_is_a_ceiling_for_all_threads(store):
    with Reader(store, "buffered", bandwidth=4e6) as reader, ThreadPoolExecutor(2) as pool:
        start = time.perf_counter()
        list(pool.map(lambda e: reader.read(0, e % 3), range(6)))
        assert reader.bytes_read / (time.perf_counter() - start) <= 4e6


def test_unsuitable_arguments(store):
    with pytest.raises(ValueError, match="no mode 'mmap'"):
        Reader(store, "mmap")
    with pytest.raises(ValueError, match="above 0"):
        Reader(store, "buffered", bandwidth=0)
    with Reader(store, "buffered") as reader:
        big = aligned_buffer(1 << 20)
        for buffer in (big[:4096], big[64:]):
            with pytest.raises(ValueError, match="a multiple of 4096"):
                reader.read(0, 0, "both", buffer)
        with pytest.raises(LookupError):
            reader.read(0, 7)
