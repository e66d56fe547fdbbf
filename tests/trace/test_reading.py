"""Traces of other programs: what their files say, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import MoESpec
from moelab.calibration import Calibration, calibrate
from moelab.cards import load_model
from moelab.trace import RoutingTrace, load, save_arrays
from moelab.trace.foreign import LARGE
from moelab.trace.statistics import statistics
from tests.models import tiny
from tests.trace.samples import POPULARITY, TRACES, routed, sglang

pytestmark = pytest.mark.filterwarnings("ignore:.*(not read|pickle protocol)")


def written(name, folder, trace):
    writer, columns = TRACES[name]
    writer(folder / name, trace)
    return folder / name, columns


@pytest.mark.parametrize("name", TRACES)
@given(
    lengths=st.lists(st.integers(3, 7), min_size=1, max_size=4),
    L=st.integers(1, 3),
    E=st.integers(4, 9),
    K=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_every_format_is_read_as_it_was_written(tmp_path_factory, name, lengths, L, E, K, seed):
    trace = routed(lengths, L, E, K, seed)
    trace.ids[0, :, 0], trace.ids[0, :, 1:] = E - 1, torch.arange(K - 1)  # E shows in the ids
    path, columns = written(name, tmp_path_factory.mktemp("trace"), trace)
    found = load(path)
    assert (found.spec.L, found.spec.E, found.spec.K) == (L, E, K)
    # passes of several sequences are read as they ran
    by = np.lexsort([found.position, found.sequence])
    for column in columns:
        assert torch.equal(getattr(found, column)[by], getattr(trace, column)), column
    if "weights" not in columns:
        assert torch.allclose(found.weights, torch.full_like(found.weights, 1 / K))
    assert statistics(found).reuse == statistics(trace).reuse or "sequence" not in columns


@pytest.mark.parametrize("name", TRACES)
def test_damaged_files_are_refused_or_right(name, tmp_path):
    """Cut off anywhere, with bytes that are others: refused by name, or a whole trace."""
    path, _ = written(name, tmp_path, routed((6, 5), seed=1))
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = [whole[:n] for n in (0, 1, 9, len(whole) // 2, len(whole) - 2)]
    damaged += [b"\0" * 64, b"[" * 9999, b"\xff\xfe{}", b"null", b"{}", b"a,b\n1,2\n", b"\x93NUMPY"]
    for _ in range(30):
        at = rng.randrange(len(whole))
        damaged.append(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            trace = load(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert 0 <= trace.ids.min() <= trace.ids.max() <= trace.spec.E
            assert trace.weights.isfinite().all() and len(trace.position) == len(trace)
    assert refused >= 8


def test_what_is_no_routing_is_refused(tmp_path):
    ids = np.array([[[0, 1]], [[2, 3]]])
    cases = [
        ({"ids": ids.astype(float)}, "integers"),
        ({"ids": ids[0]}, "any, any, any"),
        ({"ids": ids[:0]}, "no routing"),
        ({"ids": ids, "experts": 2}, "from 0 to 3"),
        ({"ids": ids - 2}, "from -2"),
        ({"ids": ids * 0 + 1}, "twice"),
        ({"ids": ids + 2**15}, "32767"),
        ({"ids": ids, "weights": ids * np.nan}, "finite"),
        ({"ids": ids, "weights": ids[:1] * 0.5}, "weights is"),
        ({"ids": ids, "phase": np.array([0, 2])}, "phase"),
        (
            {"ids": ids, "phase": np.array([1, 0]), "position": np.arange(2)},
            "a sequence of its own",
        ),
        ({"ids": ids, "position": np.array([1, 1])}, "order"),
        ({"ids": ids, "sequence": np.array([0, -1])}, "sequence"),
        ({"ids": ids, "layers": np.arange(2)}, "known are 2"),
        ({"ids": ids, "topk_ids": ids}, "twice"),
        ({"logits": np.zeros((2, 1, 4))}, "give model="),
        ({"other": ids}, "neither"),
    ]
    for arrays, message in cases:
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "x.npz")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.npz")
    (tmp_path / "x.txt").write_text("0 1")
    with pytest.raises(ValueError, match=r"\.jsonl"):
        load(tmp_path / "x.txt")


def test_code_in_a_pickle_is_not_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"records": [Hostile()]}, tmp_path / "x.pt")
    np.savez(tmp_path / "x.npz", ids=np.array([Hostile()], dtype=object))
    for name in ("x.pt", "x.npz"):
        (tmp_path / "ran").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=name):
            load(tmp_path / name)
        assert not (tmp_path / "ran").exists()


def test_what_is_not_read_is_named(tmp_path):
    np.savez(tmp_path / "x.npz", ids=np.array([[[0, 1]]]), engine_hit=np.array([1]))
    with pytest.warns(UserWarning, match="engine_hit"):
        load(tmp_path / "x.npz")


def test_sequences_are_numbered_from_0_and_tokens_within_them(tmp_path):
    ids = np.arange(6)[:, None, None] + np.arange(2)
    np.savez(tmp_path / "x.npz", ids=ids, sequence=np.array([7, 2**31 - 1, 7, 3, 7, 3]))
    found = load(tmp_path / "x.npz")
    assert found.sequence.tolist() == [1, 2, 1, 0, 1, 0] and found.sequences == 3
    assert found.position.tolist() == [0, 0, 1, 0, 2, 1]


def test_a_model_gives_sizes_and_a_trace_keeps_its_own_experts_and_layers(tmp_path):
    mixtral, coder = load_model("Mixtral-8x7B"), load_model("DeepSeek-V2-Lite")
    some = routed((5,), L=3, E=8, K=1)
    some = replace(some, spec=replace(some.spec, num_layers=9, moe_layers=(2, 5, 8)))
    save_arrays(some, tmp_path / "some.npz")
    found = load(tmp_path / "some.npz", model="mixtral-8x7b")
    assert found.spec == replace(mixtral, moe_layers=(2, 5, 8), K=1)
    assert found.spec.expert_bytes == mixtral.expert_bytes
    assert found.model_id == load(tmp_path / "some.npz", model=CARD_HUB).model_id
    with pytest.raises(ValueError, match="give model="):
        _ = load(tmp_path / "some.npz").spec.expert_bytes
    for model, message in (("DeepSeek-V2-Lite", "64"), ("nobody", "no model card")):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "some.npz", model=model)
    # an engine that counts all layers has zeros where one is dense
    whole = routed((5,), L=coder.num_layers, E=coder.E, K=coder.K)
    whole.ids[:, 0] = 0
    save_arrays(whole, tmp_path / "all.npy")
    found = load(tmp_path / "all.npy", model="DeepSeek-V2-Lite")
    assert found.spec == coder and torch.equal(found.ids, whole.ids[:, 1:])
    assert load(tmp_path / "all.npy").spec.moe_layers == coder.moe_layers
    save_arrays(routed((5,), L=3, E=coder.E, K=coder.K), tmp_path / "three.npy")
    with pytest.raises(ValueError, match="layers"):
        load(tmp_path / "three.npy", model="DeepSeek-V2-Lite")


CARD_HUB = "mistralai/Mixtral-8x7B-v0.1"


def test_logits_are_routed_as_the_model_does(tmp_path):
    spec = load_model("Mixtral-8x7B")
    logits = np.random.default_rng(0).normal(size=(4, spec.L, spec.E)).astype(np.float32)
    np.savez(tmp_path / "x.npz", logits=logits)
    found = load(tmp_path / "x.npz", model="Mixtral-8x7B")
    assert np.array_equal(found.ids.numpy(), np.argsort(-logits, -1)[..., : spec.K])
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert np.allclose(found.weights, np.take_along_axis(shares, found.ids.numpy().astype(int), -1))


def test_a_checkpoints_folder_gives_its_identity(tmp_path):
    folder = tiny.save("mixtral", tmp_path / "model")
    from moelab.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint.at(folder)
    spec = checkpoint.spec
    trace = routed((4,), L=spec.L, E=spec.E, K=spec.K)
    ours = replace(trace, spec=replace(trace.spec, num_layers=spec.num_layers))
    save_arrays(trace, tmp_path / "t.npy")
    for path in (tmp_path / "t.npy", ours.save(tmp_path / "ours.safetensors")):
        found = load(path, model=folder)
        assert (found.spec, found.model_id) == (spec, checkpoint.identity)
        assert isinstance(found, RoutingTrace) and torch.equal(found.ids, trace.ids)
    calibrate(found).require(checkpoint.identity, spec)


@pytest.mark.parametrize("name", POPULARITY)
def test_counts_without_order_are_a_calibration(name, tmp_path):
    spec = load_model("Mixtral-8x7B")
    counts = routed((40,), spec.L, spec.E, spec.K).counts().numpy()
    POPULARITY[name](tmp_path / name, counts.tolist())
    found = Calibration.load(tmp_path / name, model="Mixtral-8x7B")
    assert np.array_equal(found.counts(), counts) and found.spec == spec
    assert found.tokens == (40, 0)
    again = Calibration.load(found.save(tmp_path / "again.safetensors"))
    assert torch.equal(again.counts(), found.counts())
    if name.endswith(".csv"):
        with pytest.raises(ValueError, match=name):
            load(tmp_path / name)
        with pytest.raises(ValueError, match="give model="):
            Calibration.load(tmp_path / name)
    else:
        alone = Calibration.load(tmp_path / name).spec
        assert (alone.L, alone.E, alone.K) == (spec.L, spec.E, spec.K)


@pytest.mark.parametrize("name", POPULARITY)
def test_damaged_counts_are_refused_or_right(name, tmp_path):
    path = tmp_path / name
    POPULARITY[name](path, [[1, 2, 3]] * 2)
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = [whole[:n] for n in (0, 1, 9, len(whole) // 2)]
    for _ in range(60):
        at = rng.randrange(len(whole))
        damaged.append(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
    for content in damaged:
        path.write_bytes(content)
        try:
            counts = Calibration.load(path, model="Mixtral-8x7B").counts()
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert counts.min() >= 0 and counts.any()
    spec = MoESpec("x", "", 2, (0, 1), 3, 2, H=0, I=0)
    with pytest.raises(ValueError, match="give model="):
        _ = spec.experts_bytes


def test_files_that_grow_are_refused_before_they_are_read(tmp_path, monkeypatch):
    """A bound on what is read: of a file, of what a zip file unpacks to, of a view that repeats."""
    ids = np.array([[[0, 1]], [[2, 3]]])
    for name in ("x.npz", "x.json", "x.jsonl", "x.pt", "x.csv"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(LARGE + 1)
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<i8", "fortran_order": False, "shape": (2**40, 9, 8)}
        )
    monkeypatch.setattr("moelab.trace.foreign.LARGE", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", ids=ids, other=np.zeros(1 << 20))
    wide = torch.zeros(1, dtype=torch.int32).expand(2**18, 1, 1)
    record = {"forward_mode": 1, "input_ids": [1], "positions": [0], "extend_seq_lens": [1]}
    torch.save({"records": [record | {"topk_ids_of_layer": wide}]}, tmp_path / "y.pt")
    wide = np.array([[[0, 32000]]]).repeat(200, 1)
    np.savez_compressed(tmp_path / "wide.npz", ids=wide)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(ValueError, match=path.name) as error:
            load(path)
        assert "\n" not in str(error.value)


def test_a_gap_among_a_cells_experts_loses_none(tmp_path):
    trace = routed((3,), K=2)
    sglang(tmp_path / "x.pt", trace)
    dump = torch.load(tmp_path / "x.pt", weights_only=True)
    for record in dump["records"]:
        ids = record["topk_ids_of_layer"]
        ids[1, :, 2] = ids[1, :, 1].clone()
        ids[1, :, 1] = -1
    torch.save(dump, tmp_path / "x.pt")
    assert torch.equal(load(tmp_path / "x.pt").counts(), trace.counts())
