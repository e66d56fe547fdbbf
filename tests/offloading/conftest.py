"""What tests of the engine share: a small model's checkpoint and store."""

import pytest
import torch

from moelab import convert
from tests.models import tiny


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(folder of a checkpoint, of its store) of a small bf16 model with 2 MoE layers of 8
    experts."""
    folder = tmp_path_factory.mktemp("qwen")
    tiny.save("qwen3_moe", folder / "model", torch.bfloat16, max_position_embeddings=1024)
    convert(folder / "model", folder / "store", codec="huffman")
    return folder / "model", folder / "store"
