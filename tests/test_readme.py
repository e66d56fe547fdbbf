"""README and the pages of docs: their Python runs, page by page; recipes do what they say; README
names all that is there. `python -m tests.test_readme` writes what README's commands print."""

import os
import re
import shlex
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

import moelab
from moelab import cards
from moelab.__main__ import COMMANDS, main
from moelab.base.registry import Entry
from moelab.bench.results import why_busy
from moelab.experts import EXECUTORS
from moelab.models import eager, plug
from moelab.models.dialects import BLOCKS, ROUTING

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = [
    page for room in ("guide", "extending") for page in sorted((ROOT / "docs" / room).glob("*.md"))
]
#: pages that a build of the site has left
BUILT = (ROOT / "docs" / ".gitignore").read_text(encoding="utf-8").split()
WRITTEN = [page for page in sorted((ROOT / "docs").glob("*.md")) if f"/{page.name}" not in BUILT]
PAGES = [README, ROOT / "CONTRIBUTING.md", *WRITTEN, *GUIDES]
PRINTED = re.compile(r"(<!-- output -->\n```console\n\$ (moelab [^\n]+)\n)(.*?)(```)", re.S)
LINES = 8  # of what a command prints, in README
of_a_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def code(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def recipe(name, word):
    page = ROOT / "docs" / "extending" / f"{name}.md"
    return next(block for block in code(page) if word in block)


@pytest.mark.parametrize("page", [page for page in PAGES if code(page)], ids=lambda page: page.stem)
def test_its_python_runs(page, tmp_path, monkeypatch):
    """From top to bottom, on the small model in place of the hub's, half of it in memory."""
    monkeypatch.chdir(tmp_path)
    for registry in (ROUTING, BLOCKS):  # a recipe adds to them
        for name in [*registry, "MyRouter", "MyMoE"]:
            monkeypatch.setitem(registry, name, registry.get(name))
    names: dict = {"__name__": page.stem}
    for block in code(page):
        block = block.replace('"Qwen/Qwen3-30B-A3B"', "None").replace('"8GB"', '"50%"')
        exec(compile(block, page.name, "exec"), names)
    if page.stem == "open_model":
        run = names["run"]
        assert names["text"].shape[1] > 1 and names["name"] == moelab.names("executor")[-1]
        assert moelab.simulate(run, cache="belady").hit_rate >= moelab.simulate(run).hit_rate
    if page.stem == "bench":
        ((rows,),) = [names["run"](tokens=4).values()]
        assert all(0 < row["hit rate"] < 1 for row in rows.values())


def test_the_executors_recipe_by_name(monkeypatch):
    names: dict = {}
    exec(recipe("executor", "def strong_choices").split("with moelab")[0], names)
    monkeypatch.setitem(EXECUTORS, "strong", Entry(names["strong_choices"], "strong choices"))
    ids = torch.tensor([[5, 6, 7, 8]])

    def masked(x, ids, weights, experts):
        return eager(x, torch.where(weights > 0.1, ids, experts.num_experts), weights, experts)

    with moelab.open_model(dtype=torch.float32) as lm, moelab.using(lm, executor=masked):
        expected = lm(ids).logits
    with moelab.open_model(memory="50%", executor="strong", dtype=torch.float32) as lm:
        torch.testing.assert_close(lm(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_cards_recipe(tmp_path, monkeypatch):
    (card,) = code(ROOT / "docs" / "extending" / "card.md", "toml")
    file = tmp_path / "devices" / "my-board.toml"
    file.parent.mkdir()
    file.write_text(card)
    monkeypatch.setattr(cards, "files", lambda _: tmp_path)
    monkeypatch.setattr(cards, "DEVICES", cards.entries_of("devices", cards.load_device, str))
    monkeypatch.setattr(cards, "MODELS", {})
    assert moelab.names("device") == ["my-board"]
    with moelab.open_model(memory="50%") as lm:
        lm.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    by_name, by_path = (moelab.simulate(lm.moelab.run, device=of) for of in ("my-board", file))
    assert by_name.tpot == by_path.tpot > 0


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


def test_a_dialects_recipe(monkeypatch):
    """The translation runs as the block does."""
    monkeypatch.setitem(ROUTING, "MyRouter", None)
    monkeypatch.setitem(BLOCKS, "MyMoE", None)
    exec(recipe("dialect", "my_forward"), {})
    stock = moelab.open_model(dtype=torch.float32).model.layers[0].mlp.experts
    model, x = nn.Module(), torch.randn(1, 5, stock.hidden_dim)
    model.mlp = MyMoE(MyRouter(2, stock.num_experts, stock.hidden_dim), stock)
    model.dtype = torch.float32
    expected = model.mlp(x)
    (layer,) = plug(model)
    assert type(layer.block).__name__ == "SeamMyMoE"
    torch.testing.assert_close(model.mlp(x), expected)


def test_readme_is_one_screen_and_names_all_that_is_there():
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 12_288
    tree = re.search(r"```\n(moelab/\n.*?)```", text, re.S)[1]
    lines = [re.split(r"\s{2,}", line.rstrip())[:2] for line in tree.splitlines()]
    inside = {name for line in lines if not line[0] for name in line[1].split()}
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "moelab").iterdir()}
    assert inside == there - {"__init__.py", "__main__.py", "__main__.toml", "__pycache__/"}
    assert all((ROOT / line[0]).exists() for line in lines if line[0])
    assert all(f"(docs/{page.parent.name}/{page.name})" in text for page in GUIDES)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"`{notebook.stem}`" in text
        assert "../docs/glossary.md" in notebook.read_text(encoding="utf-8")


@of_a_page
def test_its_links_lead_somewhere_and_its_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    shell = "\n".join(code(page, "bash"))
    for command in re.findall(r"(?:`|-m |\$ )moelab ([a-z]+)", text) + re.findall(
        r"^moelab ([a-z]+)", shell, re.M
    ):
        assert command in COMMANDS, command
    for target in re.findall(r"\bmake (\w+)\b +#|`make (\w+)`", text):
        assert f"\n{''.join(target)}:" in (ROOT / "Makefile").read_text()


def printed(command, folder):
    """The first lines of what a README's command prints, in an empty folder."""
    with redirect_stdout(StringIO()) as out, chdir(folder):
        assert main(shlex.split(command)[1:]) == 0
    lines = out.getvalue().replace(f"{folder}/", "").strip().splitlines()
    return "\n".join([*lines[:LINES], *["…"] * (len(lines) > LINES)]) + "\n"


def test_readmes_commands_run(tmp_path):
    shown = PRINTED.findall(README.read_text(encoding="utf-8"))
    assert len(shown) == 3
    assert all(said and printed(command, tmp_path) for _, command, said, _ in shown)


if __name__ == "__main__":
    if (busy := why_busy()) and "--busy" not in sys.argv:
        sys.exit(f"what README shows would be slow: {busy}; wait, or give --busy")
    os.environ["COLUMNS"] = "100"
    text = README.read_text(encoding="utf-8")
    with TemporaryDirectory() as place:
        text = PRINTED.sub(lambda of: f"{of[1]}{printed(of[2], place)}{of[4]}", text)
    README.write_text(text, encoding="utf-8")
