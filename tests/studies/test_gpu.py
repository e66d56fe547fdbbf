"""The bench of a GPU as far as a CPU goes: its tokens, of a small model, behind the link of
`tests.offloading`."""

import pytest
import torch

from moelab import convert
from moelab.base.specs import MoESpec
from moelab.bench.synthesize import synthesize
from notebooks.studies import gpu
from tests.offloading.links import Delayed

SPEC = MoESpec(
    "small", "qwen3_moe", 2, (0, 1), 8, 2, 128, 128, vocab=128, heads=4, kv_heads=2, head_dim=32
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs")
def test_it_needs_a_gpu():
    with pytest.raises(ValueError, match="CUDA GPU"):
        gpu.run()


def test_tokens_of_every_arm(monkeypatch, tmp_path):
    def opened(folder, device=None, of=gpu.open_model, **options):
        return of(folder, **options)

    monkeypatch.setattr(gpu, "open_model", opened)
    monkeypatch.setattr("moelab.offloading.offload.link_to", Delayed)
    synthesize(tmp_path / "model", SPEC)
    convert(tmp_path / "model", tmp_path / "bf12", codec="bf12")
    rows = dict(
        gpu.tokens(
            tmp_path,
            torch.device("cpu"),
            list(range(3, 15)),
            1,
            8,
            (0.4,),
            SPEC.experts_bytes,
            gpu.ARMS,
        )
    )
    assert len(rows) == 2 + 2 * len(gpu.ARMS) and all(
        row["TPOT ms"] > 0 < row["TTFT ms"] for row in rows.values()
    )
    raw, packed = (rows[f"{form}, exact, 40% on the GPU"] for form in ("raw", "bf12"))
    assert (
        0 < raw["hit rate"] <= packed["hit rate"]
    )  # the same memory holds more experts of twelve bits
    assert raw["MB copied"] > packed["MB copied"] > 0
