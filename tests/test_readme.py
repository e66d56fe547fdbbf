"""The README's Python runs, from top to bottom; its recipes work; its layout names all that is
there, and nothing else."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import moelab
from moelab import cards
from moelab.experts import EXECUTORS
from moelab.models import eager, plug
from moelab.models.dialects import BLOCKS, ROUTING
from moelab.registry import Entry, make

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def block_with(word):
    return next(block for block in PYTHON if word in block)


def own(block):
    """A block with the small model in place of the hub's, half of it in memory."""
    return block.replace('"Qwen/Qwen3-30B-A3B"', "None").replace('"8GB"', '"50%"')


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for registry in (ROUTING, BLOCKS):  # a recipe adds to them
        for name in registry:
            monkeypatch.setitem(registry, name, registry[name])
    names: dict = {}
    for block in PYTHON:
        exec(compile(own(block), "README.md", "exec"), names)
    told = capsys.readouterr().out
    assert "MoE layers" in told and "of the experts were in memory" in told
    assert torch.isfinite(torch.tensor(names["lm"].moelab.metrics().ttft))
    for added in ("MyRouter", "MyMoE"):
        ROUTING.pop(added, None), BLOCKS.pop(added, None)


def test_the_way_in(tmp_path, monkeypatch):
    """What it prints and gives: a text, metrics of an offloaded run, simulations of that run, every
    executor plugged."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(own(PYTHON[0]), names)
    assert names["text"].shape[1] > 1 and names["name"] == moelab.names("executor")[-1]
    run = names["run"]
    assert len(run.steps) == len(run.forwards) == 32
    assert moelab.simulate(run, cache="belady").hit_rate >= moelab.simulate(run).hit_rate


def test_the_executors_recipe_by_name(monkeypatch):
    names: dict = {}
    exec(block_with("def strong_choices").split("with moelab")[0], names)
    monkeypatch.setitem(
        EXECUTORS, "strong", Entry(names["strong_choices"], "choices with a weight above 0.1")
    )
    ids = torch.tensor([[5, 6, 7, 8]])

    def masked(x, ids, weights, experts):
        return eager(x, torch.where(weights > 0.1, ids, experts.num_experts), weights, experts)

    with moelab.open_model(dtype=torch.float32) as lm, moelab.using(lm, executor=masked):
        expected = lm(ids).logits
    for memory in (None, "50%"):
        with moelab.open_model(memory=memory, executor="strong", dtype=torch.float32) as lm:
            torch.testing.assert_close(lm(ids).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a function, so it takes no options"):
        make("executor", "strong", factor=2.0)
    with pytest.raises(ValueError, match="Did you mean 'strong'"):
        make("executor", "Strong")


def test_a_cards_recipe(tmp_path, monkeypatch):
    card = re.search(r"```toml\n(.*?)```", README, re.S)[1]
    for kind in ("devices", "models"):
        (tmp_path / kind).mkdir()
    (tmp_path / "devices" / "my-board.toml").write_text(card)
    monkeypatch.setattr(cards, "files", lambda _: tmp_path)
    monkeypatch.setattr(cards, "DEVICES", cards.entries_of("devices", cards.load_device, str))
    monkeypatch.setattr(cards, "MODELS", {})
    assert moelab.names("device") == ["my-board"]
    with moelab.open_model(memory="50%") as lm:
        lm.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    tpot = moelab.simulate(lm.moelab.run, device="my-board").tpot
    assert (
        tpot
        == moelab.simulate(lm.moelab.run, device=tmp_path / "devices" / "my-board.toml").tpot
        > 0
    )


class MyRouter(nn.Module):
    def __init__(self, K, E, H):
        super().__init__()
        self.K, self.weight = K, nn.Parameter(torch.randn(E, H))

    def forward(self, x):
        return (x @ self.weight.T).softmax(-1).topk(self.K)


class MyMoE(nn.Module):
    def __init__(self, router, experts):
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.router(x)
        return self.experts(x, ids, weights).reshape(hidden_states.shape)


class MyModel(nn.Module):
    dtype = torch.float32

    def __init__(self):
        super().__init__()
        stock = moelab.open_model().model.layers[0].mlp.experts.float()
        self.mlp = MyMoE(MyRouter(2, stock.num_experts, stock.hidden_dim), stock)


def test_a_dialects_recipe(monkeypatch):
    """The translation runs as the block does."""
    names: dict = {}
    for registry in (ROUTING, BLOCKS):
        monkeypatch.setitem(registry, "MyRouter" if registry is ROUTING else "MyMoE", None)
    exec(block_with("my_forward"), names)
    model, x = MyModel(), torch.randn(1, 5, 128)
    expected = model.mlp(x)
    (layer,) = plug(model)
    assert type(layer.block).__name__ == "SeamMyMoE"
    torch.testing.assert_close(model.mlp(x), expected)


def test_its_layout_is_what_is_on_disk():
    tree = re.search(r"## Layout\n.*?```\n(.*?)```", README, re.S)[1]
    lines = [re.split(r"\s{2,}", line.rstrip())[:2] for line in tree.splitlines()]
    inside = {name for line in lines if not line[0] for name in line[1].split()}
    there = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "moelab").iterdir()
        if path.name != "__pycache__"
    }
    assert inside == there - {"__init__.py", "__main__.py"}
    assert all((ROOT / line[0]).exists() for line in lines if line[0])
    assert len(lines) <= 40, "it fits on a screen"


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_its_links_lead_somewhere(target):
    if target.startswith("#"):
        assert f"\n## {target[1:].capitalize()}\n" in README
    else:
        assert target.startswith("http") or (ROOT / target).exists()


def test_every_notebook_is_listed_and_links_to_the_glossary():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"`{notebook.stem}`" in README
        assert "../README.md#glossary" in notebook.read_text(encoding="utf-8")


def test_its_commands_exist():
    from moelab.__main__ import COMMANDS

    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)\b", README):
        assert target in ("reproduce", "test", "lab", "docs") and f"\n{target}:" in makefile
    commands = re.findall(r"(?:`|-m )moelab ([a-z]+)", README)
    assert len(commands) > 20
    for command in commands:
        assert command in COMMANDS
