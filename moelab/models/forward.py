"""What a forward pass is, said once for all who must know: prefill or decode, and how many tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: what holds the tokens of a forward: ids [B, S], or embeddings [B, S, H]
INPUTS = ("decoder_input_ids", "input_ids", "inputs_embeds")


class ForwardInfo(NamedTuple):
    """One forward pass of a model, or of a stack of its layers.

    phase : "decode" where each sequence goes on by one position, drafts aside, behind others that
        are cached, else "prefill".
    tokens : positions that are computed, of all sequences together; padding counts.
    cached : positions that the cache holds before.
    drafts : positions at the end that are guesses (`moelab.offloading.drafts`).
    """

    phase: str
    tokens: int
    cached: int
    drafts: int = 0


def forward_info(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ForwardInfo:
    """Of the arguments with which a model's or a stack's forward is called."""
    given = [*map(kwargs.get, INPUTS), *args[:1]]
    inputs = next((value for value in given if value is not None), None)
    shape = (0,) if inputs is None else inputs.shape[:2]
    cache = kwargs.get("past_key_values")
    cached = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
    drafts = getattr(cache, "drafts", 0)
    phase = "decode" if cached and shape[-1] - drafts <= 1 else "prefill"
    return ForwardInfo(phase, math.prod(shape), cached, drafts)
