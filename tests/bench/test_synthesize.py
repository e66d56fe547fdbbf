"""Synthetic checkpoints and stores: the card's geometry, weights that compress like trained ones,
refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moelab import cards, open_model
from moelab.__main__ import main
from moelab.base.specs import MoESpec
from moelab.bench import synthesize as synthesizing
from moelab.bench.synthesize import config_of, draw, scaled, synthesize
from moelab.checkpoint.convert import convert
from moelab.generate import generate
from moelab.store.layout import ExpertStore
from moelab.store.verify import verify
from moelab.zipmoe.entropy import joint_counts
from notebooks.studies.entropy import describe
from tests.checkpoint.stores import open_store


@pytest.fixture()
def card(monkeypatch):
    """A card of a few kilobytes under the name "card", and a pool to go with it."""
    sizes = {"E": 4, "K": 2, "H": 64, "I": 48, "vocab": 96, "heads": 4, "kv_heads": 2}
    spec = MoESpec("card", "qwen3_moe", 8, tuple(range(8)), **sizes, head_dim=16)
    monkeypatch.setattr(synthesizing, "load_model", lambda name: spec)
    monkeypatch.setattr(synthesizing, "POOL", 1 << 16)
    return spec


def test_the_weights_have_the_entropy_of_trained_ones():
    weights = draw(1 << 20).view(-1, 2048)
    row = describe(joint_counts(weights))
    assert 2.60 < row.exponent < 2.68 and row.sign > 0.999 and row.mantissa > 6.9
    rows = weights.float()
    assert abs(rows.std(1).log().std().item() - 0.25) < 0.03 and abs(rows.mean().item()) < 1e-4
    assert torch.equal(weights.flatten(), draw(1 << 20))
    assert not torch.equal(draw(1 << 12), draw(1 << 12, seed=1))


CARDS = ["Qwen3-30B-A3B", "GPT-OSS-20B", "DeepSeek-V2-Lite", "Mixtral-8x7B", "Llama4-Maverick"]


@pytest.mark.parametrize("name", CARDS)
def test_the_experts_have_the_cards_geometry(name):
    spec = scaled(cards.load_model(name), 0.1)
    assert spec.num_layers < cards.load_model(name).num_layers
    twin = synthesizing.compat.meta_twin(config_of(spec))
    experts = {n: p for n, p in twin.named_parameters() if ".experts." in n}
    assert sum(p.numel() for p in experts.values()) == spec.L * spec.E * spec.expert_params
    assert len({n.partition(".experts.")[0] for n in experts}) == spec.L


def test_checkpoint_and_store(card, tmp_path):
    folder = synthesize(tmp_path / "m", "card", 0.25)
    model = open_model(folder)
    assert model.spec.num_layers == 2 and model.spec.E == 4 and model.spec.H == 64
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert (
        not torch.equal(experts[0], experts[1])
        and torch.isfinite(model(torch.arange(9)[None]).logits).all()
    )
    assert verify(convert(folder, tmp_path / "converted"))["experts"] == 8
    store = ExpertStore(synthesize(tmp_path / "s", "card", 0.25, codec="zstd-huffman"))
    assert verify(store)["experts"] == 8 and store.codec == "zstd-huffman" and store.spec.L == 2
    assert torch.isfinite(open_store(store)(torch.arange(9)[None]).logits).all()
    assert {path.name for path in tmp_path.iterdir()} == {"m", "converted", "s"}


def test_texts_go_in_and_out(card, tmp_path, monkeypatch, capsys):
    """Checkpoints and stores have a tokenizer whose ids the vocabulary has; a small vocabulary has
    none."""
    monkeypatch.setattr(synthesizing, "load_model", lambda name: replace(card, vocab=1500))
    folder = synthesize(tmp_path / "m", "card", 0.25)
    assert generate(str(folder), "the lazy dog", 5).tokens
    model = open_store(synthesize(tmp_path / "s", "card", 0.25, codec="raw"))
    assert model.tokenizer.get_vocab() == open_model().tokenizer.get_vocab()
    assert model.tokenizer.eos_token_id == model.config.eos_token_id == 0
    monkeypatch.setattr(synthesizing, "load_model", lambda name: card)
    assert main(["generate", str(synthesize(tmp_path / "mute", "card", 0.25))]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_refusals(card, tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(FileExistsError, match="not overwritten"):
        synthesize(tmp_path / "m", "card")
    for scale in (0, 1.5, -1):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            synthesize(tmp_path / "n", "card", scale)
    with pytest.raises(ValueError, match="no codec"):
        synthesize(tmp_path / "n", "card", 0.25, codec="gzip")
    switch = MoESpec("switch", "switch_transformers", 4, (1, 3), 4, 1, 32, 24, gated=False)
    with pytest.raises(ValueError, match="synthesize another model"):
        config_of(scaled(switch, 1.0))
