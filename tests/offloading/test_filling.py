"""Where all experts fit, opening reads them: what lies in the slots, what the first prompt finds,
what can go wrong."""

from contextlib import closing

import pytest
import torch

from moelab import convert, open_model
from moelab.checkpoint import opening
from moelab.offloading.offload import offload
from moelab.store.reader import StoreExperts
from tests.models import tiny
from tests.offloading.test_offload import no_thread_is_left, threads  # noqa: F401

IDS = torch.arange(3, 20)[None]
FORMS = ["raw", "bf12", "huffman", "int4", "int4 compact"]


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("form", [*FORMS, "qwen3_moe", "mxfp4", "fp8"])
def test_the_first_prompt_finds_every_expert_and_reads_nothing(form, scope, tmp_path):
    """Codecs, few bits with and without unpacking, and checkpoints, of which some are
    converted."""
    few, name = form in ("mxfp4", "fp8"), form.removesuffix(" compact")
    folder = (tiny.save_few if few else tiny.save)(form if few else "qwen3_moe", tmp_path / "m")
    if form in FORMS:
        tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
        how = {"quantize": name} if name == "int4" else {"codec": name}
        folder = convert(tmp_path / "m", tmp_path / "s", **how).folder
    truth, lm = open_model(folder), offload(folder, 1.0, scope=scope, compact="compact" in form)
    with closing(lm.moelab) as session, torch.inference_mode():
        held = session.engine.loader.queue.held
        everyone = {(layer, expert) for layer in range(lm.spec.L) for expert in range(lm.spec.E)}
        assert set(held) == everyone
        assert len({slots["full"] for slots in held.values()}) == len(everyone)
        if form in FORMS:
            experts = StoreExperts(session.store)
            for key in everyone:
                for name, tensor in experts(*key).items():
                    assert torch.equal(session.engine.weights(*key)[name], tensor)
        assert torch.equal(lm(IDS).logits, truth(IDS).logits)
        found = session.metrics()
        assert found.hit_rate == 1 and found.misses == found.read_bytes == found.stall == 0
        assert found.hits["F"] > 0


def test_ctrl_c_while_the_other_weights_load_ends_the_reading(tmp_path, monkeypatch):
    store = convert(tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16), tmp_path / "s")

    def interrupted(*_, **__):
        assert threads()
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        offload(store, 1.0, bandwidth=1e5)  # of all experts' bytes, minutes
    assert not threads()
