"""The container: what gguf-py writes is found where its reader finds it; what is damaged is refused,
by name and soon."""

import struct
import time
from math import prod

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moelab.store.gguf import read_gguf, read_shards
from tests.gguf_files import qwen3moe

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "Q3_K", "MXFP4", "IQ4_XS"]
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3)
fields = st.dictionaries(
    st.text("abcdefghij._", min_size=1, max_size=20),
    st.one_of(
        st.booleans(),
        st.integers(-(2**31), 2**31 - 1),
        st.text(min_size=1, max_size=20),
        st.lists(st.text(max_size=8), min_size=1, max_size=5),
        st.lists(st.integers(0, 255), min_size=1, max_size=5),
    ),
    max_size=5,
)


def add(writer, key, value):
    {
        bool: writer.add_bool,
        int: writer.add_int32,
        str: writer.add_string,
        list: writer.add_array,
    }[type(value)](key, value)


def written(path, tensors, fields=None, alignment=32):
    """A file by gguf-py: name → (kind, shape), of random bytes."""
    w = gguf.GGUFWriter(str(path), "qwen3moe")
    if alignment != 32:
        w.add_custom_alignment(alignment)
    for key, value in (fields or {}).items():
        add(w, key, value)
    rng = np.random.default_rng(0)
    for name, (kind, shape) in tensors.items():
        of = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[of]
        shape = (*shape[:-1], shape[-1] // block * size)
        w.add_tensor(name, rng.integers(0, 256, shape, dtype=np.uint8), raw_dtype=of)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=8),
        st.tuples(st.sampled_from(KINDS), shapes),
        max_size=4,
    ),
    fields,
    st.sampled_from([8, 32, 64, 4096]),
)
def test_what_gguf_py_writes_is_where_its_reader_finds_it(tmp_path, tensors, fields, alignment):
    sizes = {n: (kind, (*shape, 256)) for n, (kind, shape) in tensors.items()}
    path = written(tmp_path / "x.gguf", sizes, fields, alignment)
    said, found = read_gguf(path)
    for key, value in fields.items():
        got = said[key]
        assert (
            got if isinstance(value, str) else list(got) if isinstance(value, list) else got
        ) == value
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        own = found[name]
        assert own.shape == tuple(int(n) for n in tensor.shape[::-1]) == sizes[name][1]
        assert own.dtype == tensor.tensor_type.name
        assert (own.begin, own.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert own.read(0, own.nbytes).tobytes() == tensor.data.tobytes()
        row = own.nbytes // prod(own.shape[:-1])
        last = own.slice(own.shape[0] - 1) if len(own.shape) > 1 else own
        assert last.begin + last.nbytes == own.begin + own.nbytes
        if own.dtype not in ("F32", "F16", "BF16"):
            assert own.empty().shape == (*own.shape[:-1], row)


# ------------------------------------------------------------------------------------------ hostile


def text(words):
    words = words.encode() if isinstance(words, str) else words
    return struct.pack("<Q", len(words)) + words


def tensor(name="a", ne=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def head(fields=b"", tensors=b"", n_fields=0, n_tensors=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, n_tensors, n_fields) + fields + tensors


def field(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def u32(value):
    return struct.pack("<I", value)


DATA = bytes(4096)
ARRAY = struct.pack("<IQ", 9, 1)
HOSTILE = {
    "an empty file": (b"", ""),
    "another format": (b"PK\3\4" + DATA, "begins with"),
    "version 1": (head(version=1) + DATA, "version"),
    "big-endian": (head(version=3 << 24) + DATA, "lowest byte first"),
    "cut off in its head": (head(n_fields=1)[:-3], "cut off"),
    "too many fields": (head(n_fields=1 << 62), "which no model has"),
    "too many tensors": (head(n_tensors=1 << 62), "which no model has"),
    "fields that are not there": (head(n_fields=60_000), "cut off"),
    "a name as long as memory": (head(struct.pack("<Q", 1 << 62), n_fields=1), "cut off"),
    "an array as long as memory": (
        head(field("a", 9, struct.pack("<IQ", 8, 1 << 60)), n_fields=1) + DATA,
        "as no vocabulary has",
    ),
    "an array of numbers as long": (
        head(field("a", 9, struct.pack("<IQ", 12, 1 << 62)), n_fields=1) + DATA,
        "as no vocabulary has",
    ),
    "arrays in arrays": (
        head(field("a", 9, ARRAY * 40), n_fields=1) + DATA,
        "arrays lie in an array",
    ),
    "an unknown kind of value": (head(field("a", 77, u32(1)), n_fields=1) + DATA, "kind 77"),
    "a field twice": (head(field("a", 4, u32(1)) * 2, n_fields=2) + DATA, "twice"),
    "alignment 0": (head(field("general.alignment", 4, u32(0)), n_fields=1) + DATA, "alignment"),
    "alignment 12": (head(field("general.alignment", 4, u32(12)), n_fields=1) + DATA, "alignment"),
    "alignment in words": (
        head(field("general.alignment", 8, text("32")), n_fields=1),
        "alignment",
    ),
    "no axes": (head(tensors=tensor(ne=()), n_tensors=1) + DATA, "axes"),
    "a thousand axes": (head(tensors=text("a") + u32(1000), n_tensors=1) + DATA, "axes"),
    "no weights": (head(tensors=tensor(ne=(0, 3)), n_tensors=1) + DATA, "cannot be F32"),
    "more weights than fit": (
        head(tensors=tensor(ne=(1 << 40, 1 << 40)), n_tensors=1) + DATA,
        "cannot be F32",
    ),
    "rows of parts of blocks": (
        head(tensors=tensor(ne=(40, 2), kind=8), n_tensors=1) + DATA,
        "cannot be Q8_0",
    ),
    "an unknown type": (head(tensors=tensor(kind=250), n_tensors=1) + DATA, "a is type 250"),
    "a type that is not read": (
        head(tensors=tensor(ne=(256,), kind=16), n_tensors=1) + DATA,
        "a is IQ2_XXS, a type that is not read; .*Q4_K",
    ),
    "a ternary type": (head(tensors=tensor(ne=(256,), kind=34), n_tensors=1) + DATA, "TQ1_0"),
    "a tensor behind the end": (
        head(tensors=tensor(offset=1 << 40), n_tensors=1) + DATA,
        "ends at 1,099,511",
    ),
    "a tensor that is not aligned": (
        head(tensors=tensor(offset=20), n_tensors=1) + DATA,
        "aligned",
    ),
    "a tensor twice": (head(tensors=tensor() + tensor(offset=128), n_tensors=2) + DATA, "twice"),
    "tensors in each other": (
        head(tensors=tensor(ne=(64,)) + tensor("b", offset=32), n_tensors=2) + DATA,
        "inside the tensor before it",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path, what):
    data, message = HOSTILE[what]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(ValueError, match=f"x.gguf.*{message}"):
        read_gguf(path)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        head(field("a", 9, struct.pack("<IQ", 8, 2_000_000)), n_fields=3),
        head(field("a", 9, struct.pack("<IQ", 12, 2_000_000)), n_fields=3),
        head(n_fields=60_000, n_tensors=200_000),
    ],
)
def test_a_gigabyte_of_zeros_is_refused_soon(tmp_path, begin):
    path = tmp_path / "x.gguf"
    with open(path, "wb") as file:
        file.write(begin)
        file.truncate(1 << 30)
    start = time.process_time()
    with pytest.raises(ValueError, match="x.gguf"):
        read_gguf(path)
    assert time.process_time() - start < 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    qwen3moe(path, "Q4_0", layers=1)
    return path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_bytes_that_change_are_refused_or_read(model, tmp_path, random, changes):
    """Whatever a head says, it is read within the file or refused with a ValueError."""
    data = bytearray(model)
    for _ in range(changes):
        at = random.randrange(9000)
        data[at : at + random.choice([1, 4, 8])] = random.choice(
            [b"\xff" * 8, b"\0" * 4, b"\x01", b""]
        )
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    try:
        _, found = read_gguf(path)
    except ValueError as error:
        assert "x.gguf" in str(error)
    else:
        assert all(of.begin + of.nbytes <= len(data) for of in found.values())


@pytest.mark.parametrize("size", [0, 3, 8, 24, 100, 5000, 100_000])
def test_a_file_that_is_cut_off_is_refused(model, tmp_path, size):
    path = tmp_path / "x.gguf"
    path.write_bytes(model[:size])
    with pytest.raises(ValueError, match="x.gguf"):
        read_gguf(path)


# ------------------------------------------------------------------------------------------ shards


@pytest.fixture
def shards(tmp_path):
    qwen3moe(tmp_path / "m.gguf", "Q4_0", layers=1, shards=6)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_shards_are_one_model(shards, tmp_path):
    qwen3moe(tmp_path / "whole.gguf", "Q4_0", layers=1)
    _, _, whole = read_shards(tmp_path / "whole.gguf")
    for shard in shards:
        files, fields, found = read_shards(shard)
        assert files == shards and fields["general.architecture"] == "qwen3moe"
        assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
            n: (t.dtype, t.shape) for n, t in whole.items()
        }


def replaced(path, before, after):
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after, 1))


def number(key, value):
    return key.encode() + struct.pack("<IH", 2, value)


HARMED = {
    "one is missing": (lambda a, b, *_: b.unlink(), FileNotFoundError, "00002-of-"),
    "one is there twice": (
        lambda a, b, *_: b.write_bytes(a.read_bytes()),
        ValueError,
        "00002.*not of this",
    ),
    "one is a link": (
        lambda a, b, *_: (b.unlink(), b.symlink_to(a.name)),
        ValueError,
        "00002.*not of this model",
    ),
    "links in a circle": (
        lambda a, b, *_: (b.unlink(), b.symlink_to(b.name)),
        FileNotFoundError,
        "00002",
    ),
    "another number": (
        lambda a, b, *_: replaced(b, number("split.no", 1), number("split.no", 2)),
        ValueError,
        "00002.*not of this model",
    ),
    "another name": (
        lambda a, *_: a.rename(a.with_name("z.gguf")),
        ValueError,
        "give them their names",
    ),
}


@pytest.mark.parametrize("what", HARMED)
def test_shards_that_are_not_one_model_are_refused(shards, tmp_path, what):
    harm, error, message = HARMED[what]
    harm(*shards)
    first = tmp_path / "z.gguf" if what == "another name" else shards[0]
    with pytest.raises(error, match=message):
        read_shards(first)


def test_a_shard_of_another_model_is_refused(shards, tmp_path):
    (tmp_path / "other").mkdir()
    qwen3moe(tmp_path / "other" / "m.gguf", "Q8_0", layers=2, shards=9)
    others = sorted((tmp_path / "other").iterdir())
    assert len(others) == len(shards)
    shards[1].write_bytes(others[1].read_bytes())
    with pytest.raises(ValueError, match="00002.*not of this model"):
        read_shards(shards[0])
