"""Every architecture of transformers with routed experts, by everything that moelab does with a
model.

    python -m tests.models.sweep            try all, write architectures.json beside this file and the table of the docs
    python -m tests.models.sweep NAME …     try these and say what was found

A small random model of each is saved and opened by transformers alone, with its eager experts: the
oracle. What it generates from a left-padded batch, with a cache, in fp32 and in bf16, every way of
moelab must generate, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import moelab
from moelab import open_model
from moelab.base.configs import REFUSED, spec_from_config
from moelab.models import (
    compat,
    deepseek,  # noqa: F401  (makes transformers know it)
    discover,
    plug,
)
from moelab.models.experts import banks
from tests.models import tiny

TABLE = Path(__file__).with_name("architectures.json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
MARKS = (
    "<!-- architectures: written by python -m tests.models.sweep -->",
    "<!-- end of architectures -->",
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CODECS, BUDGETS = ("raw", "bf12", "huffman"), (0.3, 0.8)
PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71]]


def generate(model: Any, seed: int = 0, steps: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy generation with a cache from two prompts padded on the left (an encoder's on the
    right): (tokens, logits of every step)."""
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(seed))
    mask, padding = (
        torch.ones_like(ids),
        slice(-4, None) if model.config.is_encoder_decoder else slice(4),
    )
    ids[0, padding] = mask[0, padding] = 0
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits)


def stock(folder: Path) -> Any:
    """A checkpoint opened by transformers alone, with its weights where torch allocates them: the
    last bits of a product of one row may depend on the address."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = compat.model_class(config).from_pretrained(
        folder, config=config, dtype="auto", experts_implementation="eager"
    )
    for p in model.parameters():
        p.data = p.data.clone()
    return model.eval()


class Case:
    """One architecture in one dtype: its checkpoint, and what transformers alone makes of it."""

    def __init__(self, name: str, dtype: torch.dtype, folder: Path) -> None:
        self.folder, self.source = folder, tiny.save(name, folder / "model", dtype)
        self.model = stock(self.source)
        self.tokens, self.logits = generate(self.model)
        assert torch.isfinite(self.logits).all(), "transformers itself gives NaN"

    def same(self, model: Any) -> None:
        tokens, logits = generate(model)
        assert torch.equal(tokens, self.tokens) and torch.equal(logits, self.logits), (
            "other tokens or logits"
        )

    @property
    def stores(self) -> list[Path]:
        folders = [self.folder / codec for codec in CODECS]
        for folder, codec in zip(folders, CODECS):
            if not folder.exists():
                moelab.convert(self.source, folder, codec=codec)
        return folders


def geometry(case: Case) -> None:
    """The spec says what the model has: L, E, H, I and the weights of an expert, K what a router
    chooses."""
    spec, layers = spec_from_config(case.model.config), discover(case.model)
    chosen: list[int] = []
    hooks = [
        layer.router.register_forward_hook(
            lambda _m, _a, out, layer=layer: chosen.append(layer.routing(out)[0].shape[-1])
        )
        for layer in layers
    ]
    generate(case.model, steps=2)
    for hook in hooks:
        hook.remove()
    assert len(layers) == spec.L, f"L is {spec.L}, and there are {len(layers)} MoE layers"
    assert {spec.K} == set(chosen), f"K is {spec.K}, and routers choose {set(chosen)}"
    for module in (layer.experts for layer in layers):
        apart = isinstance(module, torch.nn.ModuleDict)  # Switch; all others are banks [E, …]
        found = {"": module} if apart else banks(module)
        E = len([*found.values()][-1])  # LongCat's up has rows that are never used
        tensors = (
            dict(module["expert_0"].named_parameters())
            if apart
            else {name: bank[0] for name, bank in found.items()}
        )
        weights = sum(tensor.numel() for tensor in tensors.values())
        (down,) = (
            tensors[name] for name in ("wo.weight", "down_proj", "mlp.w2") if name in tensors
        )
        assert (spec.E, {spec.H, spec.I}) == (E, set(down.shape)), "another E, H or I"
        assert weights == spec.expert_params, (
            f"an expert has {weights} weights, and the spec {spec.expert_params}"
        )
        assert spec.dtype == str(down.dtype).removeprefix("torch."), "another dtype"


def resident(case: Case) -> None:
    """Opened by moelab, and plugged."""
    model = open_model(case.source)
    plug(model)
    case.same(model)


def external(case: Case) -> None:
    """Opened without its experts, which are read one by one."""
    case.same(open_model(case.source, experts="external"))


def record(case: Case) -> None:
    """What is recorded is what the experts of the stock model were given."""
    given: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    layers = discover(case.model)
    hooks = [
        layer.router.register_forward_hook(
            lambda _m, _a, out, layer=layer: given.append((layer.index, *layer.routing(out)))
        )
        for layer in layers
    ]
    generate_all(case.model, PROMPTS[0])
    for hook in hooks:
        hook.remove()
    trace = moelab.record(
        open_model(case.source, experts="external"),
        [PROMPTS[0]],
        max_new_tokens=3,
        min_new_tokens=3,
    )
    for layer in layers:
        ids = torch.cat([ids for index, ids, _ in given if index == layer.index])
        weights = torch.cat(
            [weights for index, _, weights in given if index == layer.index]
        ).float()
        recorded = trace.ids[:, layer.index].long()
        went, passed = (
            (ids != layer.E).any(-1),
            (recorded != layer.E).any(-1),
        )  # the others: dropped, or not here
        assert torch.equal(recorded[passed], ids[went].long()), "other ids"
        ran = ids[went] != layer.E
        assert torch.equal(trace.weights[passed, layer.index][ran], weights[went][ran]), (
            "other weights"
        )


def generate_all(model: Any, prompt: list[int]) -> None:
    model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
    )


def convert(case: Case) -> None:
    """Stores of both codecs hold what the model loads: opened from them it generates the same."""
    for store in case.stores:
        case.same(moelab.open_model(store))


def offload(case: Case) -> None:
    """Both stores and the checkpoint itself, with memory for a third and for four fifths of the
    experts."""
    for source in (case.source, *case.stores):
        for budget in BUDGETS:
            with moelab.open_model(source, memory=budget) as model:
                case.same(model)


def restore(case: Case) -> None:
    """Every tensor of the source comes back, with its name, dtype, shape and bytes."""
    for store in case.stores:
        back = moelab.restore(store, case.folder / f"{store.name} restored")
        ours, theirs = (
            {
                key: value
                for file in sorted(folder.glob("*.safetensors"))
                for key, value in load_file(file).items()
            }
            for folder in (back, case.source)
        )
        assert ours.keys() == theirs.keys(), "other tensors"
        assert all(
            ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key])
            for key in ours
        )


CHECKS: dict[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (geometry, resident, external, record, convert, offload, restore)
}


def refused(name: str) -> str | None:
    """Why moelab does not run an architecture: what it says when it is given one."""
    config = transformers.AutoConfig.for_model(name)
    reasons = [
        REFUSED[kind] for kind in (config.get_text_config().model_type, name) if kind in REFUSED
    ]
    if not reasons:
        return None
    try:
        spec_from_config(config)
    except ValueError as error:
        assert reasons[0] in str(error)
        return reasons[0]
    raise AssertionError(f"{name} is to be refused, and is not")


def run(name: str, dtype: str, checks: tuple[str, ...] = tuple(CHECKS)) -> dict[str, str]:
    """check → "exact", or what went wrong; an architecture that cannot be tried has one entry, "why
    not"."""
    if reason := refused(name):
        return {"why not": reason}
    folder = Path(tempfile.mkdtemp(prefix="sweep."))
    try:
        try:
            case = Case(name, DTYPES[dtype], folder)
        except Exception as error:  # of transformers alone: nothing of moelab has run
            return {"why not": f"transformers does not run it: {_line(error)}"}
        found = {}
        for check in checks:
            try:
                CHECKS[check](case)
                found[check] = "exact"
            except Exception as error:
                found[check] = f"{type(error).__name__}: {_line(error)}"
        return found
    finally:
        shutil.rmtree(folder)


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", re.sub(r"/\S*sweep\.\w+/", "", str(error)))[:300]


# ---------------------------------------------------------------------------------------------------------
# the table


@cache
def table() -> dict[str, Any]:
    """What the last whole sweep found: {"transformers": version, "architectures": {name: {dtype:
    {check: …}}}}."""
    return json.loads(TABLE.read_text())


def markdown(found: dict[str, Any]) -> str:
    """The table of docs/reference/architectures.md."""
    rows = [f"| architecture | {' | '.join(CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    exact, left = 0, []
    for name, by_dtype in sorted(found["architectures"].items()):
        if any("why not" in of for of in by_dtype.values()):
            left.append(
                f"| {name} | {next(of['why not'] for of in by_dtype.values() if 'why not' in of)} |"
            )
            continue
        wrong = {
            check: said for of in by_dtype.values() for check, said in of.items() if said != "exact"
        }
        left += [f"| {name}: {', '.join(wrong)} | {said} |" for said in list(wrong.values())[:1]]
        cells = [{of[check] == "exact" for of in by_dtype.values()} == {True} for check in CHECKS]
        exact += all(cells)
        rows.append(f"| {name} | {' | '.join('✓' if cell else '✗' for cell in cells)} |")
    said = (
        f"Of the {len(found['architectures'])} architectures with routed experts that transformers "
        f"{found['transformers']} can generate text with, {exact} are exact in all that is tried, in fp32 and bf16 "
        f"(✓: equal to transformers' eager, bit for bit):"
    )
    return "\n".join(
        [said, "", *rows, "", "Why not:", "", "| architecture | why |", "|---|---|", *left]
    )


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = {}
    for name in names or tiny.every():
        found[name] = {dtype: run(name, dtype) for dtype in DTYPES}
        problems = {
            dtype: {check: said for check, said in of.items() if said != "exact"}
            for dtype, of in found[name].items()
        }
        print(name, {dtype: of for dtype, of in problems.items() if of} or "exact", flush=True)
    if not names:
        result = {"transformers": transformers.__version__, "architectures": found}
        TABLE.write_text(json.dumps(result, indent=1) + "\n")
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(
            f"{before}{MARKS[0]}\n\n{markdown(result)}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
