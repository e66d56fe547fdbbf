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
from typing import Any, NotRequired, TypedDict

import numpy as np

from moelab.base.schema import Count, parse_json, typed
from moelab.trace.foreign import Columns, bounded
from moelab.trace.routing_trace import DECODE, PREFILL


class Usage(TypedDict):
    prompt_tokens: Count


class Response(TypedDict):
    choices: list[dict]
    prompt_routed_experts: NotRequired[Any]
    prompt_token_ids: NotRequired[list | None]
    usage: NotRequired[Usage | None]


def read(path: Path) -> Columns:
    """The routing of all choices. Raises ValueError."""
    found = parse_json(bounded(path).read_bytes())
    sequences = []
    phases = []
    for response in typed(found if isinstance(found, list) else [found], list[Response]):
        before = _array(response.get("prompt_routed_experts"))
        for choice in response["choices"]:
            if (ids := _array(choice.get("routed_experts"))) is None:
                continue
            if before is not None:
                prompt = len(before)
                ids = np.concatenate([before, ids])
            elif tokens := response.get("prompt_token_ids"):
                prompt = len(tokens)
            else:
                prompt = response["usage"]["prompt_tokens"]
            sequences.append(ids)
            phases.append(np.where(np.arange(len(ids)) < prompt, PREFILL, DECODE))
    if not sequences:
        raise ValueError(
            "no choice of it has routed_experts: start the server so that it returns them"
        )
    return Columns(
        ids=np.concatenate(sequences),
        phase=np.concatenate(phases),
        sequence=np.repeat(np.arange(len(phases)), [len(ids) for ids in sequences]),
    )


def _array(said: Any) -> np.ndarray | None:
    """Nested lists, or a .npy file in base64, [T, L, K]; None as it is."""
    if isinstance(said, str):
        said = np.load(io.BytesIO(base64.b64decode(said, validate=True)), allow_pickle=False)
    return None if said is None else np.asarray(said)
