"""Reading from a store on disk: everything is read and decoded, threads overlap, and the sums are
right."""

import pytest
import torch

from moelab.store.reader import Reader, decode, modes
from notebooks.studies import reading
from notebooks.studies.reading import synthetic_expert

EXPERTS = [synthetic_expert(1 << 16, seed) for seed in range(5)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return [
        reading.write_store(folder / codec, EXPERTS, codec) for codec in ("raw", "zstd-huffman")
    ]


@pytest.mark.parametrize("mode", modes())
def test_every_expert_is_read_once_and_decoded_after_it_was_read(stores, mode):
    for store in stores:
        with Reader(store, mode) as reader:
            for i, expert in enumerate(EXPERTS):
                chunks = reader.read(0, i)
                assert torch.equal(decode(chunks, chunks)["weight"], expert)
    assert [kind for kind, _, _ in reading.timeline(stores[0], mode, None)["disk"]] == ["read"] * 5
    spans = reading.timeline(stores[1], mode, 0)["one thread"]
    assert [kind for kind, _, _ in spans] == ["read", "decode"] * 5
    rows = reading.timeline(stores[1], mode, threads=2)
    assert list(rows) == ["disk", "thread 1", "thread 2"] and len(rows["disk"]) == 5
    decodes = sorted(rows["thread 1"] + rows["thread 2"], key=lambda span: span[1])
    assert len(decodes) == 5
    assert all(decode[1] >= read[2] for read, decode in zip(rows["disk"], decodes))
    for row in (spans, *rows.values()):
        assert all(before[2] <= after[1] for before, after in zip(row, row[1:]))


def test_a_damaged_expert_fails_instead_of_hanging(tmp_path):
    store = reading.write_store(tmp_path / "store", EXPERTS, "raw")
    file = store.folder / store.layers[0].file
    data = bytearray(file.read_bytes())
    data[store.entries(0, 2)["weight"].planes[0][1][0].offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="expert 2"):
        reading.timeline(store, "buffered", threads=2)


def test_a_slower_disk_delivers_less():
    found = reading.Study.of(1 << 16, 2, [1], 1, 0, [5e6], "huffman")
    here, slow = found.rates(), found.rates(5e6)
    assert set(found.rows) == set(here) and found.gain(reading.BASE)[0] == 1
    assert here[reading.BASE] > slow[reading.BASE] <= 0.0055  # GB/s
