"""Responses of a vLLM server that runs with --enable-return-routed-experts: JSON, one response or a
list of them.

    {"model": …, "prompt_token_ids": […] or "usage": {"prompt_tokens": n},
     "choices": [{"routed_experts": [[[…]]] or a .npy file in base64, "token_ids": […]}],
     "prompt_routed_experts": …}

A choice is a sequence. Its routing begins with the prompt's, unless `prompt_routed_experts` has that,
and ends with the last token but one, since the last is never fed back. Source: vLLM pull request
28284 and its successors."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

from moelab.base.schema import Count, parse_json, typed
from moelab.trace.foreign import Columns, bounded
from moelab.trace.routing_trace import DECODE, PREFILL


def read(path: Path) -> Columns:
    """The routing of all choices. Raises ValueError."""
    found = parse_json(bounded(path).read_bytes())
    responses = found if isinstance(found, list) else [found]
    sequences = [one for response in responses for one in _choices(response)]
    if not sequences:
        raise ValueError(
            "no choice of it has routed_experts: start the server so that it returns them"
        )
    lengths = [len(ids) for ids, _ in sequences]
    phase = [np.where(np.arange(len(ids)) < prompt, PREFILL, DECODE) for ids, prompt in sequences]
    return Columns(
        ids=np.concatenate([ids for ids, _ in sequences]),
        phase=np.concatenate(phase),
        sequence=np.repeat(np.arange(len(lengths)), lengths),
        position=np.concatenate([np.arange(length) for length in lengths]),
    )


def _choices(response: Any) -> list[tuple[np.ndarray, int]]:
    """(ids [T, L, K], tokens of the prompt) of each choice."""
    if not isinstance(response, dict) or not isinstance(response.get("choices"), list):
        raise ValueError("it is no response of a server, which has choices")
    before = _array(response.get("prompt_routed_experts"))
    found = []
    for choice in response["choices"]:
        ids = _array(choice.get("routed_experts"))
        if ids is None:
            continue
        if before is not None:
            found.append((np.concatenate([before, ids]), len(before)))
        else:
            found.append((ids, _prompt_tokens(response)))
    return found


def _prompt_tokens(response: dict[str, Any]) -> int:
    if isinstance(tokens := response.get("prompt_token_ids"), list):
        return len(tokens)
    usage = typed(response.get("usage", {}), dict, "usage")
    return typed(usage.get("prompt_tokens"), Count, "usage.prompt_tokens")


def _array(said: Any) -> np.ndarray | None:
    """Nested lists, or a .npy file in base64, [T, L, K]; None as it is."""
    if said is None:
        return None
    if isinstance(said, str):
        said = np.load(io.BytesIO(base64.b64decode(said, validate=True)), allow_pickle=False)
    found = np.asarray(said)
    if found.ndim != 3:
        raise ValueError(f"routed_experts is {list(found.shape)}; it must be [T, L, K]")
    return found
