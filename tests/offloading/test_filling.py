"""Where all experts fit, opening reads them: what lies in the slots, what the first prompt finds,
what can go wrong."""

import pytest
import torch

from moelab import convert, open_model, simulate
from moelab.checkpoint import opening
from moelab.offloading.offload import offload
from moelab.store.layout import StoreError
from moelab.store.reader import StoreExperts
from tests.models import tiny
from tests.offloading.test_offload import DELAYS, damaged, no_thread_is_left, threads  # noqa: F401

IDS = torch.arange(3, 20)[None]
#: codecs, formats of few bits with and without unpacking, and checkpoints, of which some are
#: converted
FORMS = ["raw", "bf12", "huffman", "int4", "int4 compact", "qwen3_moe", "mxfp4", "fp8"]


def opened(form, folder, memory, **options):
    """(an opened model's session, one in memory that must agree, its experts' tensors by layer and
    expert)."""
    if form in ("mxfp4", "fp8", "qwen3_moe"):
        made = (
            tiny.save_few(form, folder / "m")
            if form != "qwen3_moe"
            else tiny.save(form, folder / "m")
        )
        return offload(made, memory, delays=DELAYS, **options), open_model(made), None
    model = tiny.save("qwen3_moe", folder / "m", torch.bfloat16)
    name, compact = form.partition(" ")[::2]
    store = convert(
        model, folder / "s", **({"quantize": name} if name == "int4" else {"codec": name})
    )
    lm = offload(store, memory, delays=DELAYS, compact=bool(compact), **options)
    return lm, open_model(store.folder), StoreExperts(store)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scope", ["model", "layer"])
def test_the_first_prompt_finds_every_expert_and_reads_nothing(form, scope, tmp_path):
    lm, truth, experts = opened(form, tmp_path, 1.0, scope=scope)
    with lm.moelab as session, torch.inference_mode():
        held = session.engine.loader.queue.held
        everyone = {(layer, expert) for layer in range(lm.spec.L) for expert in range(lm.spec.E)}
        assert set(held) == everyone and len({slots["full"] for slots in held.values()}) == len(
            everyone
        )
        for key in everyone if experts else ():
            for name, tensor in experts(*key).items():
                assert torch.equal(session.engine.weights(*key)[name], tensor)
        assert torch.equal(lm(IDS).logits, truth(IDS).logits)
        found, played = session.metrics(), simulate(session.run).metrics()
        for of in (found, played):
            assert of.hit_rate == 1 and of.misses == of.read_bytes == of.stall == 0
        assert found.hits == played.hits and found.hits["F"] > 0


def test_where_one_does_not_fit_nothing_is_read(tmp_path):
    lm, truth, _ = opened("raw", tmp_path, 0.9)
    with lm.moelab as session, torch.inference_mode():
        assert not session.engine.loader.queue.held and len(session.residency) == 0
        assert torch.equal(lm(IDS).logits, truth(IDS).logits)
        assert session.metrics().misses > 0 and session.metrics().read_bytes > 0


@pytest.mark.parametrize("memory", [1.0, "1GB"])
def test_what_cannot_be_read_is_named_when_the_model_is_opened(memory, tmp_path):
    with pytest.raises(StoreError, match=r"damaged: chunk 0\.5\.down_proj"):
        offload(damaged(tmp_path, [5]), memory, delays=DELAYS)
    assert not threads()


def test_ctrl_c_while_the_other_weights_load_ends_the_reading(tmp_path, monkeypatch):
    store = convert(tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16), tmp_path / "s")

    def interrupted(*_, **__):
        assert threads()
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        offload(store, 1.0, delays=DELAYS, bandwidth=1e5)  # of all experts' bytes, minutes
    assert not threads()
