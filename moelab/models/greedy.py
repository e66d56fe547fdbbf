"""Greedy decoding, whatever a checkpoint's generation_config.json has for defaults: one sequence,
as token ids."""

from __future__ import annotations

from typing import Any

#: what another way of decoding, or of returning it, would change; all else of the defaults is
#: honoured
OPTIONS = {
    "do_sample": False,
    "num_beams": 1,
    "num_beam_groups": None,
    "num_return_sequences": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "return_dict_in_generate": False,
    "cache_implementation": None,
    "use_mtp": False,
    "is_assistant": False,
    "token_healing": False,
}


def greedy(model: Any) -> dict[str, Any]:
    """What `model.generate` takes besides to decode greedily, returning ids [B, S]; stop strings
    need the tokenizer."""
    known = {
        name: value for name, value in OPTIONS.items() if hasattr(model.generation_config, name)
    }
    return known | {"tokenizer": getattr(model, "tokenizer", None)}


def not_followed(model: Any) -> str:
    """Those of the checkpoint's defaults that `greedy` does not follow, as "name=value, …"."""
    wanted = ((name, getattr(model.generation_config, name, None)) for name in OPTIONS)
    return ", ".join(
        f"{name}={value!r}" for name, value in wanted if value not in (None, OPTIONS[name])
    )
