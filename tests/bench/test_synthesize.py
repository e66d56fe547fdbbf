"""Synthetic checkpoints and stores: the card's geometry, weights that compress like trained ones,
refusals."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from moelab import cards, open_model
from moelab.__main__ import main
from moelab.bench import synthesize as synthesizing
from moelab.bench.synthesize import config_of, draw, scaled, synthesize
from moelab.checkpoint.convert import convert
from moelab.generate import generate
from moelab.specs import MoESpec
from moelab.store import inspect
from moelab.store.layout import ExpertStore
from moelab.store.verify import verify
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
    weights = draw(1 << 20)
    exponents = (weights.view(torch.uint16).numpy() >> 7) & 255
    p = np.bincount(exponents, minlength=256) / len(exponents)
    entropy = -sum(x * math.log2(x) for x in p if x)
    assert 2.60 < entropy < 2.68
    rows = weights.float().view(-1, synthesizing.COLUMNS)
    assert (
        abs(rows.std(1).log().std().item() - 0.25) < 0.03
        and abs(weights.float().mean().item()) < 1e-4
    )
    assert torch.equal(weights, draw(1 << 20)) and not torch.equal(weights, draw(1 << 20, seed=1))


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-30B-A3B",
        "GPT-OSS-20B",
        "DeepSeek-V2-Lite",
        "Mixtral-8x7B",
        "Llama4-Maverick",
    ],
)
def test_the_experts_have_the_cards_geometry(name):
    spec = scaled(cards.load_model(name), 0.1)
    assert spec.num_layers < cards.load_model(name).num_layers
    twin = synthesizing.compat.meta_twin(config_of(spec))
    experts = {n: p for n, p in twin.named_parameters() if ".experts." in n}
    assert sum(p.numel() for p in experts.values()) == spec.L * spec.E * spec.expert_params
    assert len({n.partition(".experts.")[0] for n in experts}) == spec.L


def test_checkpoint_and_store(card, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
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
    assert inspect.main(argparse.Namespace(store=str(store.folder))) == 0
    printed = capsys.readouterr().out
    assert "2 MoE layers of 4 experts" in printed and re.search(
        "gate_up_proj +BF16 +96×64", printed
    )
    raw = 8 * 3 * 64 * 48 * 2
    assert f"{raw / 1e6:.2f}" in printed.splitlines()[-3]  # the row of all experts


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
    with pytest.raises(ValueError, match="synthesize another model"):
        config_of(
            scaled(
                MoESpec("switch", "switch_transformers", 4, (1, 3), 4, 1, 32, 24, gated=False), 1.0
            )
        )
