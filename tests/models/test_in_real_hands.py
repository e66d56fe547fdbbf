"""What people do with a model, each as its public thread tells it, beside transformers with its
eager experts."""

from __future__ import annotations

import copy
import json
import os
from functools import lru_cache

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moelab import convert, open_model
from tests.models import tiny

PROMPT = torch.tensor([[5, 9, 33, 12, 60, 7, 8, 41, 17, 90, 3, 11]])
WAYS = {
    "resident": {},
    "offloaded": {"memory": "50%"},
    "prefetched": {"memory": "30%", "prefetch": "router"},
    "fast": {"executor": "fast"},
    "fast offloaded": {"memory": "50%", "executor": "fast"},
}


GREEDY = {"do_sample": False, "eos_token_id": None}


def greedy(model, ids=PROMPT, n=6, **options):
    return model.generate(ids, max_new_tokens=n, **GREEDY, **options).tolist()


def eager(folder):
    """The oracle: the checkpoint as transformers opens and runs it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager"
    ).eval()


def same(found, wanted, within=1e-4):
    """Equal tokens and counts, close tensors, in the same places."""
    if isinstance(wanted, torch.Tensor):
        assert torch.allclose(found, wanted, atol=within)
    elif isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted):
            same(*pair, within)
    else:
        assert found == wanted


# -------------------------------------------------------------------------------------------------
# one model, many uses


def router_logits(model):
    """huggingface/transformers issues 31722 and 39203: router logits through generate, with a dense
    layer between."""
    with torch.no_grad():
        one = model(PROMPT, labels=PROMPT, output_router_logits=True)
    told = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    made = model.generate(PROMPT, max_new_tokens=4, **GREEDY, **told)
    of_one = one.router_logits, one.aux_loss, one.loss
    return *of_one, made.logits, len(made.hidden_states), made.sequences.tolist()


def padded(model):
    """huggingface/transformers issue 30378, ml-explore/mlx-lm issue 1906: prompts of several
    lengths, padded on the left, a mask with a hole, beams."""
    batch, mask = (
        PROMPT.repeat(3, 1) + torch.arange(3)[:, None],
        torch.ones(3, PROMPT.shape[1], dtype=torch.long),
    )
    mask[0, :4] = mask[1, :7] = mask[2, 4:6] = 0
    return [
        greedy(model, batch * mask, 8, attention_mask=mask, num_beams=beams) for beams in (1, 3)
    ]


def top_k_changed(model):
    """arcee-ai/mergekit issue 111: more or fewer experts a token, set on the live model."""
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    before, found = routers[0].top_k, [greedy(model)]
    for k in (1, 4, 8, before):
        for router in routers:
            router.top_k = k
        found.append(greedy(model))
    assert found[0] == found[-1]
    return found


def kept_cache(model):
    """blaizzy/mlx-vlm pull request 1946 and its like: a cache that a chat goes on with, one prefix
    copied for two."""
    cache, ids = transformers.DynamicCache(config=model.config), PROMPT
    for _ in range(3):
        said = model.generate(ids, past_key_values=cache, max_new_tokens=5, **GREEDY)
        ids = torch.cat([said, torch.tensor([[5, 6]])], 1)
    prefix = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT[:, :8], past_key_values=prefix, use_cache=True)
    ends = [torch.cat([PROMPT[:, :8], torch.tensor([[a, a + 1]])], 1) for a in (10, 20)]
    return said.tolist(), [
        greedy(model, end, past_key_values=copy.deepcopy(prefix)) for end in ends
    ]


def other_caches(model):
    """As `kept_cache`: a static cache, a prompt in chunks, no cache, prompt lookup."""
    return [
        greedy(model, cache_implementation="static"),
        greedy(model, prefill_chunk_size=5),
        greedy(model, use_cache=False),
        greedy(model, PROMPT.repeat(1, 3), prompt_lookup_num_tokens=4),
    ]


def assisted(model):
    """As `kept_cache`: decoding with a draft model, here transformers' own."""
    return greedy(model, assistant_model=draft())


def continuous_batching(model):
    """huggingface/transformers pull request 44924: `generate_batch`, its paged cache."""
    how = transformers.GenerationConfig(
        max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # without these two all free memory is taken
    room = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    made = model.generate_batch([PROMPT[0].tolist(), PROMPT[0, 4:].tolist()], how, room)
    return [list(map(int, one.generated_tokens)) for one in made.values()]


USES = [
    router_logits,
    padded,
    top_k_changed,
    kept_cache,
    other_caches,
    assisted,
    continuous_batching,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(
        "qwen3_moe", tmp_path_factory.mktemp("hands") / "model", max_position_embeddings=256
    )


@pytest.fixture(scope="module")
def wanted(folder):
    """use → what transformers' own model gives."""
    model = eager(folder)
    return lru_cache(maxsize=None)(lambda use: use(model))


@lru_cache(maxsize=1)
def draft():
    from moelab.models import compat

    torch.manual_seed(9)
    config = tiny.config(
        "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[], max_position_embeddings=256
    )
    return tiny.randomise(compat.model_class(config)._from_config(config)).eval()


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_model_in_use_is_transformers_own(folder, wanted, options):
    """One opened model, used in all these ways, one after another: what one leaves behind would
    spoil the next."""
    with open_model(folder, **options) as lm:
        for use in USES:
            same(use(lm), wanted(use))


# ---------------------------------------------------------------------------------------------------
# other checkpoints


@pytest.mark.parametrize("E, K", [(5, 2), (1, 1)])
def test_a_pruned_model(E, K, tmp_path):
    """Experts cut off in every layer, as pruning does, until one is left."""
    folder = tiny.save("qwen3_moe", tmp_path / "model", num_experts=E, num_experts_per_tok=K)
    reference = greedy(eager(folder))
    for options in WAYS.values():
        with open_model(folder, **options) as lm:
            assert greedy(lm) == reference


def test_a_model_pruned_in_one_layer_is_refused_by_its_name(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "model")
    file, gone = (
        folder / "model.safetensors",
        tuple(f"layers.2.mlp.experts.{e}." for e in (5, 6, 7)),
    )
    kept = {key: w for key, w in load_file(file).items() if not any(part in key for part in gone)}
    kept["model.layers.2.mlp.gate.weight"] = kept["model.layers.2.mlp.gate.weight"][:5].contiguous()
    save_file(kept, file, {"format": "pt"})
    for options in WAYS.values():
        with pytest.raises(ValueError, match=r"layers\.2"):
            open_model(folder, **options)


def test_images(tmp_path):
    """An image-text model whose decoder has experts: pixels, their places, a text after them."""
    folder = tiny.save(
        "qwen3_vl_moe",
        tmp_path / "model",
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        text_config={
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            }
        },
        vision_config={
            "depth": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    )
    ids = torch.tensor([[5, 92, 90, 90, 90, 90, 93, 8]])
    image = {
        "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 90).long(),
        "attention_mask": torch.ones_like(ids),
    }
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, experts_implementation="eager"
    ).eval()
    reference = greedy(model, ids, **image)
    assert reference != greedy(model, ids, **image | {"pixel_values": -image["pixel_values"]})
    for options in WAYS.values():
        with open_model(folder, **options) as lm:
            assert greedy(lm, ids, **image) == reference


def test_more_shards_than_a_process_may_open_files(tmp_path):
    """JustVugg/colibri pull request 147: 150 shards and 80 files; macOS allows 256."""
    resource = pytest.importorskip("resource")
    folder = tiny.save("qwen3_moe", tmp_path / "model", torch.bfloat16, num_hidden_layers=6)
    tensors, where = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for i in range(150):
        part = {key: w for j, (key, w) in enumerate(tensors.items()) if j % 150 == i}
        save_file(
            part, folder / (name := f"model-{i + 1:05d}-of-00150.safetensors"), {"format": "pt"}
        )
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    reference, (soft, hard) = (
        greedy(eager(folder), n=24),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    taken = {int(name) for name in os.listdir("/dev/fd")}
    resource.setrlimit(
        resource.RLIMIT_NOFILE, ([n for n in range(1 << 16) if n not in taken][80], hard)
    )
    try:
        for source, options in (
            (folder, {}),
            (folder, {"memory": "50%"}),
            (convert(folder, tmp_path / "store").folder, {"memory": "50%"}),
        ):
            with open_model(source, **options) as lm:
                assert greedy(lm, n=24) == reference
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
