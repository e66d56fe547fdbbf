"""Models whose experts are a few bits wide: rounded by `convert`, or published so and kept byte for
byte."""

from __future__ import annotations

import pytest
import torch
import transformers

from moelab import open_model
from moelab.__main__ import main
from moelab.checkpoint import convert as converting
from moelab.checkpoint.convert import convert, kept_store
from moelab.checkpoint.experts import CheckpointExperts
from moelab.checkpoint.restore import restore
from moelab.models import discover, plug
from moelab.models.identity import identity
from moelab.store import fewbit
from moelab.store.layout import SOURCE_LAYOUT, ExpertStore, StoreError
from moelab.store.reader import StoreExperts
from moelab.store.verify import verify
from tests.checkpoint.stores import identity_of
from tests.depth import depth, in_turn
from tests.models import tiny
from tests.store.faults import small_checkpoint

IDS = torch.arange(3, 20)[None]


def rounded(folder, name):
    """The source's model with every matrix of its experts rounded in place, expert by expert."""
    model = open_model(folder)
    for layer in discover(model):
        transposed = getattr(layer.experts, "is_transposed", False)
        form = fewbit.find_format(name + ".T" * bool(transposed))
        for w in layer.experts.parameters():
            for expert in w.data:
                if (blob := form.compress(expert)) is not None:
                    form.decompress(blob, expert)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    "name, architecture",
    [("int8", "qwen3_moe"), ("fp8", "gpt_oss"), ("mxfp4", "qwen3_moe"), ("int4", "gpt_oss")],
)
def test_a_rounded_model_is_eager_on_its_rounded_weights(name, architecture, tmp_path):
    """However it is opened; biases, and down_proj of 24 inputs, keep their bits."""
    source = tiny.save(architecture, tmp_path / "m", torch.bfloat16)
    truth = rounded(source, name)
    store = convert(source, tmp_path / "s", quantize=name)
    assert (
        store.quantized == name
        and store.identity == f"{identity_of(source)}-{name}" == identity_of(store.folder)
    )
    assert verify(store)["experts"] == store.spec.L * store.spec.E
    forms = {
        entry: {codec.name for codec, _ in of.planes} for entry, of in store.entries(0, 0).items()
    }
    form = name + ".T" * (architecture == "gpt_oss")
    assert forms["gate_up_proj"] == {form} and not {form} & forms["down_proj"]
    expected = logits(truth)
    assert not torch.equal(expected, logits(open_model(source)))
    every = (
        {},
        {"memory": "40%", "prefetch": "router"},
        {"experts": "external"},
        {"memory": "40%"},
    )
    for options in depth(every[:2], every):
        with open_model(store.folder, **options) as model:
            assert torch.equal(logits(model), expected), options
            assert identity(model) == store.identity
    with pytest.raises(StoreError, match=f"was quantised to {name}"):
        restore(store, tmp_path / "r")
    with pytest.raises(ValueError, match="these are weights of"):
        plug(open_model(source), source=StoreExperts(store))
    with pytest.raises(ValueError, match=f"was quantised to {name}; convert the checkpoint"):
        convert(store.folder, tmp_path / "t")


@pytest.mark.parametrize(
    "name, architecture",
    [("int8", "qwen3_moe"), ("fp8", "gpt_oss"), ("mxfp4", "qwen3_moe"), ("int4", "gpt_oss")],
)
def test_kernels_multiply_it_as_it_lies(name, architecture, tmp_path):
    """Of 64 and 128 inputs, in slots of the stored bytes: the rounded model within bf16's
    tolerance."""
    source = tiny.save(
        architecture,
        tmp_path / "m",
        torch.bfloat16,
        hidden_size=64,
        moe_intermediate_size=128,
        **({"intermediate_size": 128} if architecture == "gpt_oss" else {}),
    )
    store = convert(source, tmp_path / "s", quantize=name)
    with open_model(store.folder, memory="40%") as model:
        expected, joined = logits(model), model.moelab.engine.loader.slots.sizes.full
    with open_model(store.folder, memory="40%", executor="fast") as model:
        slots = model.moelab.engine.loader.slots
        assert slots.sizes.in_place and slots.sizes.full < joined
        at = [*range(0, 17, depth(8, 1))]
        for _ in range(2):
            with torch.no_grad():
                steps = torch.cat([model(IDS[:, : n + 1]).logits[:, -1:] for n in at], 1)
        assert (steps - expected[:, at]).float().norm() < 0.03 * expected.float().norm()
        assert slots.matrices([0], 0, [0], model.dtype)["gate_up_proj"][0].startswith(name)
    with open_model(store.folder, memory="40%", compact=True) as model:  # unpacked at each use
        assert model.moelab.engine.loader.slots.sizes.in_place and torch.equal(
            logits(model), expected
        )


def test_cut_off_it_goes_on_to_the_same_bytes_and_not_in_another_format(tmp_path, monkeypatch):
    source = small_checkpoint(tmp_path / "m")
    truth = {
        p.name: p.read_bytes()
        for p in convert(source, tmp_path / "truth", quantize="int4").folder.iterdir()
    }
    monkeypatch.setattr("moelab.store.writer.COMMIT", 1)
    made, calls = CheckpointExperts.made, []

    def interrupted(self, layer, expert):
        calls.append((layer, expert))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return made(self, layer, expert)

    monkeypatch.setattr(CheckpointExperts, "made", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "s", quantize="int4")
    for other in (None, "int8"):
        with pytest.raises(ValueError, match="unfinished store with another quantized"):
            convert(source, tmp_path / "s", quantize=other)
    calls[:] = [None] * 10
    done = convert(source, tmp_path / "s", quantize="int4").folder
    assert (0, 0) not in calls and {p.name: p.read_bytes() for p in done.iterdir()} == truth


def test_on_the_way_it_is_converted_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "cache"))
    source = small_checkpoint(tmp_path / "m")
    with open_model(source, memory="50%", quantize="int8") as model:
        first = logits(model)
    (store,) = (tmp_path / "cache").glob("*.int8")
    assert ExpertStore(store).quantized == "int8"
    lossless = kept_store(source, "raw").folder
    assert (
        lossless.parent == store.parent
        and lossless != store
        and ExpertStore(lossless).quantized is None
    )
    monkeypatch.setattr(converting, "convert", None)
    assert kept_store(source, "raw").folder == lossless
    for again in (source, store):
        assert torch.equal(logits(open_model(again, quantize="int8")), first)
    with pytest.raises(ValueError, match="no format 'int3'"):
        monkeypatch.undo()
        convert(source, tmp_path / "t", quantize="int3")
    assert main(["convert", str(source), str(tmp_path / "u"), "--quantize", "mxfp4"]) == 0
    assert "rounded to mxfp4, verified" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "u")]) == 0
    assert "rounded to mxfp4, so its source cannot be restored" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------
# published in few bits


@pytest.mark.parametrize(
    "name, scales",
    [
        ("qwen3_moe", torch.float32),
        ("deepseek_v3", torch.float8_e8m0fnu),
    ],
)
def test_fp8_is_transformers_dequantised_model(name, scales, tmp_path, monkeypatch):
    """Kept as it is, restored byte for byte, and exact however it is opened; from a store of a
    store, too."""
    source = tiny.save_fp8(tmp_path / "m", name, scales=scales)
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True
    )
    truth = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        dtype=torch.bfloat16,
        experts_implementation="eager",
    ).eval()
    expected = logits(truth)
    assert torch.isfinite(expected).all() and expected.std() > 0
    first = convert(source, tmp_path / "s")
    second = convert(first.folder, tmp_path / "t", "raw")
    for store in (first, second):
        kinds = {codec.name for entry in store.entries(0, 0).values() for codec, _ in entry.planes}
        assert (
            kinds == {"fp8"} and store.quantized is None and store.identity == identity_of(source)
        )
        back = restore(store, tmp_path / f"{store.folder.name}-back")
        assert {p.name: p.read_bytes() for p in back.iterdir()} == {
            p.name: p.read_bytes() for p in source.iterdir()
        }
    places = source, first.folder, second.folder
    for place, options in in_turn(places, [{"memory": "40%"}, {"experts": "external"}, {}]):
        with open_model(place, **options) as model:
            assert torch.equal(logits(model), expected), (place, options)


def test_fp8_in_other_blocks_is_dequantised(tmp_path):
    """Still exact; the store holds bf16, and is not restored."""
    source = tiny.save_fp8(tmp_path / "m", block=64)
    store = convert(source, tmp_path / "s")
    assert SOURCE_LAYOUT not in store.files
    expected = logits(open_model(source))
    assert torch.equal(logits(open_model(store.folder)), expected)
    with pytest.raises(StoreError, match="does not hold the bytes.*no layout.json"):
        restore(store, tmp_path / "r")
