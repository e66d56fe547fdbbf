"""Reading from a store on disk: everything is read and decoded, threads overlap, and the sums are
right."""

import pytest
import torch

from moelab.bench import reading
from moelab.bench.store import synthetic_expert
from moelab.store.reader import Reader, decode, modes

EXPERTS = [synthetic_expert(1 << 16, seed) for seed in range(5)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return [
        reading.write_store(folder / codec, EXPERTS, codec) for codec in ("raw", "zstd-huffman")
    ]


def test_the_stores_hold_the_experts(stores):
    for store in stores:
        with Reader(store, "buffered") as reader:
            for i, expert in enumerate(EXPERTS):
                chunks = reader.read(0, i)
                assert torch.equal(decode(chunks, chunks)["weight"], expert)
    assert stores[1].table()[-1]["fraction"] < 0.7 < stores[0].table()[-1]["fraction"] == 1


@pytest.mark.parametrize("mode", modes())
def test_every_expert_is_read_once_and_decoded_after_it_was_read(stores, mode):
    assert [kind for kind, _, _ in reading.timeline(stores[0], mode, None)["disk"]] == ["read"] * 5
    spans = reading.timeline(stores[1], mode, 0)["one thread"]
    assert [kind for kind, _, _ in spans] == ["read", "decode"] * 5
    assert all(before[2] <= after[1] for before, after in zip(spans, spans[1:]))
    rows = reading.timeline(stores[1], mode, threads=2)
    assert list(rows) == ["disk", "thread 1", "thread 2"] and len(rows["disk"]) == 5
    decodes = sorted(rows["thread 1"] + rows["thread 2"], key=lambda span: span[1])
    assert len(decodes) == 5
    assert all(decode[1] >= read[2] for read, decode in zip(rows["disk"], decodes))
    for row in rows.values():
        assert all(before[2] <= after[1] for before, after in zip(row, row[1:]))


def test_a_damaged_expert_fails_instead_of_hanging(tmp_path):
    store = reading.write_store(tmp_path / "store", EXPERTS, "raw")
    file = store.folder / store.layers[0].file
    data = bytearray(file.read_bytes())
    data[store.entries(0, 2)["weight"].planes[0][1][0].offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="expert 2"):
        reading.timeline(store, "buffered", threads=2)


def test_a_study_of_disks():
    found = reading.Study.of(1 << 16, 2, [1], 1, 0, [5e7], synthetic_expert, "huffman")
    assert set(found.samples) == {0.0, 5e7} and found.gain(reading.BASE)[0] == 1
    assert found.rate(0.5) == pytest.approx(found.here["compressed, read only"]["GB/s"] / 2)
    rates, modelled, measured = found.curves(0.6, {1: 3.0})
    assert all(len(values) == len(rates) for values in modelled.values()) and set(measured) == set(
        modelled
    )
    assert {row.partition(":")[0] for row in found.spans()} == {"in turn", "at once"}
