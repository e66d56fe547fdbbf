"""The bench of an advice for a GPU as far as a CPU goes: its ways run on the CPU, which is taken for
one."""

from dataclasses import replace

import pytest
import torch

from moelab.advice import gpu
from moelab.base.specs import MoESpec
from notebooks.studies import advise, advise_on_gpu
from tests.advice.test_gpu import card

SPEC = MoESpec(
    "small", "qwen3_moe", 2, (0, 1), 8, 2, 128, 128, vocab=1280, heads=4, kv_heads=2, head_dim=32
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs")
def test_it_needs_a_gpu():
    with pytest.raises(ValueError, match="no GPU here"):
        advise.run(device="cuda")


def test_every_budget_is_predicted_and_measured(monkeypatch, tmp_path):
    def opened(folder, host=None, device=None, hybrid=0, of=advise_on_gpu.open_model, **options):
        return of(folder, **options)

    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(advise_on_gpu, "open_model", opened)
    monkeypatch.setattr(advise_on_gpu, "here", lambda: card(host_memory_gb=64))
    found = advise_on_gpu.on_gpu((0.6, 1.0), 1, tmp_path, SPEC)
    assert found["conditions"]["launches fitted to"] == "as it is, 100%, as it is, 60%"
    rows = found["on a GPU"]
    assert [*rows] == [
        f"{form}, {share} on the GPU" for share in ("60%", "100%") for form in advise_on_gpu.FORMS
    ]
    for name, row in rows.items():
        assert row["measured ms"] > 0 < row["predicted ms"] and 0 < row["hit rate"] <= 1
        assert ("launches fitted, predicted ÷ measured" in row) != name.startswith("as it is")


def test_launches_are_found_in_two_tokens(monkeypatch, tmp_path):
    monkeypatch.setattr(advise_on_gpu, "here", lambda: card(host_memory_gb=64))
    true = card(host_memory_gb=64, layer_ms=0.25, step_ms=0.05)
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_moe", "hidden_size": 128, "moe_intermediate_size": 128, '
        '"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 128, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "decoder_sparse_step": 1, '
        '"mlp_only_layers": [], "tie_word_embeddings": false, "torch_dtype": "bfloat16"}'
    )
    asked = replace(advise_on_gpu.asked_of(tmp_path, 0.5), batch=2)
    real = gpu.OnGpu(**vars(asked) | {"device": true})
    every, some = (advise_on_gpu.seconds(real, hits) for hits in (1.0, 0.7))
    found = advise_on_gpu.fitted(asked, every, some, 0.7)
    assert found.device["layer_ms"] == pytest.approx(0.25)
    assert found.device["step_ms"] == pytest.approx(0.05)
