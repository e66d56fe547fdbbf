"""Models of every architecture in GGUF: logits are those of transformers on the decoded weights, and
what is exported opens as the same model. The files are written by `gguf_files`, not by moelab."""

import gguf
import numpy as np
import pytest
import torch

import moelab
from moelab.checkpoint.export import export
from moelab.checkpoint.gguf_names import config_of
from moelab.checkpoint.opening import open_checkpoint
from tests.checkpoint import gguf_files
from tests.depth import depth

IDS = torch.tensor([[3, 17, 42, 9, 80, 5, 33, 61, 7, 90, 12, 55]])
EXPORTED = sorted(
    gguf_files.NAMES.keys()
    - {"gpt_oss", "deepseek_v2", "deepseek_v3", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text"}
)


def require_same(one, other, ids=IDS):
    """Fails unless two models compute the same logits, but for the order of sums."""
    with torch.no_grad():
        expected, found = one(ids).logits, other(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name",
    depth(
        [
            "qwen3_5_moe_text",
            "granitemoeshared",
            "gpt_oss",
            "deepseek_v3",
            "lfm2_moe",
            "minimax_m2",
        ],
        gguf_files.NAMES,
    ),
)
def test_logits_are_those_of_transformers(name, tmp_path):
    file = gguf_files.write(name, tmp_path / name)
    reference = open_checkpoint(tmp_path / name, dtype="float32")
    require_same(reference, open_checkpoint(file, dtype="float32"))


BLOCKS = [
    ("gpt_oss", ("MXFP4",), 64),  # transposed in transformers, gate and up in turn
    ("mixtral", ("Q8_0", "Q4_0"), 64),
    ("granitemoe", ("Q4_0",), 64),
    ("qwen3_moe", ("Q4_K", "Q6_K", "Q8_0"), 256),
]


@pytest.mark.parametrize("name, kinds, size", depth([BLOCKS[0], BLOCKS[3]], BLOCKS))
def test_experts_are_multiplied_in_the_blocks_of_the_file(name, kinds, size, tmp_path):
    names = "hidden_size", "intermediate_size", "moe_intermediate_size"
    sizes = dict.fromkeys(names, size)
    file = gguf_files.write(name, tmp_path / name, kinds=kinds, **sizes)
    reference = open_checkpoint(tmp_path / name, dtype="float32")
    rounded = open_checkpoint(tmp_path / name, dtype="bfloat16")
    expected = prompt_and_token(reference)
    scale = expected.abs().max()
    rounding = (prompt_and_token(rounded) - expected).abs().max()  # of all inputs to 8 bits
    for executor in "exact", "fast":
        for memory in None, "50%":
            how = {"executor": executor, "memory": memory, "dtype": "float32"}
            with moelab.open_model(file, **how) as model:
                found = prompt_and_token(model)
                kept = {e.codec.name for of in model.moelab.store.layers for e in kept_of(of)}
            apart = (found - expected).abs().max()
            assert apart <= (1e-5 * scale if executor == "exact" else rounding), how
            assert {kind.removesuffix(".T") for kind in kept} <= {*kinds, "raw"}
            assert kept != {"raw"}


def kept_of(layer):
    """What is kept of the matrices of a layer's first expert."""
    return [entry for entry in layer.experts[0].values() if len(entry.shape) > 1]


def prompt_and_token(model):
    """Logits of a prompt, and of a token after it."""
    with torch.no_grad():
        prompt = model(IDS[:, :-1], use_cache=True)
        token = model(IDS[:, -1:], past_key_values=prompt.past_key_values)
    return torch.cat([prompt.logits, token.logits], 1)


@pytest.mark.parametrize("experts", ["apart", "together"])
@pytest.mark.parametrize("name", depth(["mixtral"], ["mixtral", "qwen3_moe", "glm4_moe"]))
def test_experts_in_tensors_of_their_own_and_gate_with_up(name, experts, tmp_path):
    file = gguf_files.write(name, tmp_path / name, experts, ("F16",))
    reference = open_checkpoint(tmp_path / name, dtype="float32")
    require_same(reference, open_checkpoint(file, dtype="float32"))


@pytest.mark.parametrize("name", depth(["mixtral", "ernie4_5_moe"], EXPORTED))
def test_an_exported_model_opens_as_the_same(name, tmp_path):
    gguf_files.write(name, tmp_path / name, kinds=("BF16",))
    model = open_checkpoint(tmp_path / name, dtype="float32")
    with pytest.warns(UserWarning, match="no tokenizer"):
        file = export(tmp_path / name, tmp_path / "out.gguf", "BF16")
    require_same(model, open_checkpoint(file, dtype="float32"))
    with pytest.raises(FileExistsError):
        export(tmp_path / name, file, "BF16")


def test_matrices_are_rounded_and_all_else_is_not(tmp_path):
    gguf_files.write("qwen3_moe", tmp_path / "model", kinds=("F32",))
    with pytest.warns(UserWarning, match="no tokenizer"):
        file = export(tmp_path / "model", tmp_path / "out.gguf", "Q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_down_exps.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"


def test_what_llama_cpp_computes_otherwise_is_not_exported(tmp_path):
    from tests.models import tiny

    tiny.save("qwen3_moe", tmp_path / "one", norm_topk_prob=False)
    tiny.save("gpt_oss", tmp_path / "other")
    tiny.save("qwen3_moe", tmp_path / "dense", mlp_only_layers=[1])
    refused = (("one", "norm_topk_prob"), ("other", "gpt_oss"), ("dense", r"layers\.1\.mlp"))
    for name, words in refused:
        with pytest.raises(ValueError, match=words):
            export(tmp_path / name, tmp_path / "out.gguf", "Q8_0")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(metadata, tensors) of a file."""
    from moelab.store.gguf import read_shards

    file = gguf_files.write("mixtral", tmp_path_factory.mktemp("gguf") / "model")
    _, fields, header = read_shards(file)
    return dict(fields), header


@pytest.mark.parametrize(
    "key, value",
    [
        ("general.architecture", "gptj"),
        ("llama.expert_used_count", None),
        ("llama.embedding_length", None),
        ("llama.expert_weights_scale", np.float32(2.5).item()),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.rope.freq_base_swa", 1e4),
        ("llama.expert_gating_func", 2),
    ],
)
def test_what_no_config_has_a_word_for_is_refused_by_name(found, key, value):
    fields, header = found
    fields = {**fields, key: value}
    if value is None:
        del fields[key]
    with pytest.raises(ValueError, match=key.split(".", 1)[1].replace("architecture", "gptj")):
        config_of(fields, header)


def test_a_tensor_that_the_model_has_not_is_refused_by_name(tmp_path):
    file = gguf_files.write("mixtral", tmp_path / "model")
    raw = file.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight")
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=r"attn_z\.weight"):
        open_checkpoint(file, dtype="float32")
