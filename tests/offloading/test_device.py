"""A GPU that runs whole tokens alone, in Triton's interpreter where there is none: what it computes, what
it keeps by which rule, and what is left of a token that ends early."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moelab import convert, open_model
from moelab import fast as kernels
from moelab.experts import gemv
from moelab.fast import fast_decode, graphs
from moelab.offloading.link import PinnedReader
from tests.fast.test_graphs import naive_attention
from tests.models import tiny
from tests.offloading.test_link import CPU, DEVICES, Ordered


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """form → folder, of one bf16 model whose weights bf12 can pack."""
    folder = tmp_path_factory.mktemp("forms")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    tiny.save("qwen3_moe", folder / "model", torch.bfloat16, **sizes)
    for codec in ("raw", "bf12"):
        convert(folder / "model", folder / codec, codec=codec)
    return {form: folder / form for form in ("model", "raw", "bf12")}


@pytest.fixture
def opened(monkeypatch):
    """Opens a model with its experts in pinned memory for a device, "cpu" as if it were a GPU."""
    called, call = [], graphs.GraphStretch.compute
    monkeypatch.setattr(graphs.GraphStretch, "compute", lambda *of: called.append(of) or call(*of))

    def opens(folder, memory, device, **options):
        if device == "cpu":
            for module in (graphs, gemv):
                monkeypatch.setattr(module, "GPUS", ("cpu",))
            monkeypatch.setattr(fast_decode, "KERNELS", [graphs.GraphLayer])
            attention = SimpleNamespace(attend=naive_attention)
            monkeypatch.setitem(sys.modules, "moelab.fast.attention_triton", attention)
            monkeypatch.setattr(kernels, "attention_triton", attention, raising=False)
            for size, n in ("ROWS", 128), ("COLUMNS", 64), ("ESCAPES", 64):  # few programs
                monkeypatch.setattr(f"moelab.experts.gemv_triton.{size}", n)
            monkeypatch.setattr("moelab.offloading.slots.link_to", Ordered)
            monkeypatch.setattr(
                "moelab.offloading.offload.PinnedReader",
                lambda store, _, **given: PinnedReader(store, CPU, **given),
            )
            monkeypatch.setattr(
                "moelab.offloading.offload.Offloading.require_possible", lambda _: None
            )
        called.clear()
        return open_model(folder, memory=memory, device=device, mode="pinned", **options)

    opens.called = called
    return opens


def decode(lm, tokens, prompt=6):
    """Logits of each token after a prompt."""
    found, cache = [], None
    with torch.inference_mode():
        for part in (tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)):
            out = lm(part.to(lm.device), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[0, -1].float().cpu())
    return torch.stack(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["raw", "bf12"])
@pytest.mark.parametrize("memory", [0.3, 0.6, 1.0])
def test_tokens_are_those_of_the_step_path(form, memory, device, forms, opened):
    tokens = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    with open_model(forms["model"], device=device) as lm:
        wanted = decode(lm, tokens)
    with opened(forms[form], memory, device, executor="fast") as lm:
        got = decode(lm, tokens)
        assert len(opened.called) >= 12
        assert (got - wanted).norm() < 3e-2 * wanted.norm()
        print(lm.moelab.metrics())
