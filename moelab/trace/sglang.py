"""SGLang's expert distribution recorder, mode per_token: a .pt file of one rank.

    {"records": [{"forward_pass_id", "rank", "forward_mode": 1 (extend) or 2 (decode),
                  "input_ids": […], "positions": […], "extend_seq_lens": […] or None,
                  "topk_ids_of_layer": int32 [layers, tokens, at least K], −1 beyond K}, …],
     "last_physical_to_logical_map": [layers, physical experts]}

The ids are of physical experts and are mapped back. A pass does not name its requests: extending
passes give their lengths, and a row of a decoding pass goes to the first sequence, in the order in
which they began, that has as many tokens as its position says and took part in every decoding pass
since its own first. Read without running code that a
pickle may contain. Source: sglang/srt/eplb/expert_distribution.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.trace.foreign import Columns, bounded, integers, require_bytes
from moelab.trace.routing_trace import DECODE, PREFILL

EXTEND = 1
ONE_TOKEN = 2


def read(path: Path) -> Columns:
    """The routing of all passes. Raises ValueError."""
    dump = torch.load(bounded(path), map_location="cpu", weights_only=True)
    if not isinstance(dump, dict) or not dump.get("records"):
        raise ValueError(
            "it has no records: record with --expert-distribution-recorder-mode per_token"
        )
    sequences = _Sequences()
    passes = [_pass(record, sequences) for record in dump["records"] if len(record["input_ids"])]
    require_bytes(sum(one["ids"].nbytes for one in passes))  # a view may have more than the file
    columns = {name: np.concatenate([one[name] for one in passes]) for name in passes[0]}
    ids = columns.pop("ids")
    ids = ids[:, :, : int(np.flatnonzero((ids >= 0).any((0, 1))).max(initial=-1)) + 1]
    experts = None
    if (logical := dump.get("last_physical_to_logical_map")) is not None:
        logical = np.asarray(logical)
        experts = int(logical.max()) + 1
        layers = np.arange(ids.shape[1])[:, None]
        ids = np.where(ids < 0, -1, logical[layers, ids])
    # layers that are dense have no routing at all
    layers = np.flatnonzero((ids >= 0).any((0, 2)))
    return Columns(ids=ids[:, layers], layers=tuple(layers.tolist()), experts=experts, **columns)


def _pass(record: dict[str, Any], sequences: _Sequences) -> dict[str, np.ndarray]:
    """The columns of one forward pass."""
    ids = np.asarray(record["topk_ids_of_layer"]).swapaxes(0, 1)
    T = len(ids)
    tokens, position = (
        integers(name, record[name], (T,)).numpy() for name in ("input_ids", "positions")
    )
    decode = record["forward_mode"] == ONE_TOKEN
    rows = [1] * T if decode else record["extend_seq_lens"]
    if record["forward_mode"] not in (EXTEND, ONE_TOKEN) or sum(rows) != T:
        raise ValueError(
            f"a record has {T} tokens, forward_mode {record['forward_mode']} and sequences of {rows}; the "
            "mode is 1 (extend) or 2 (decode), and the sequences have the tokens"
        )
    begins = np.cumsum(rows) - rows
    parts = [(int(position[at]), count) for at, count in zip(begins, rows) if count]
    return {
        "ids": ids,
        "tokens": tokens,
        "position": position,
        "sequence": np.repeat(sequences.of(parts, decode), [n for _, n in parts]),
        "phase": np.full(T, DECODE if decode else PREFILL),
    }


class _Sequences:
    """Sequences of passes so far, told apart by how many tokens they have."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.ended: set[int] = set()
        self.decoding: set[int] = set()

    def of(self, parts: list[tuple[int, int]], decode: bool) -> list[int]:
        """The sequence of each part of a pass: (its first position, its tokens)."""
        found = []
        for position, count in parts:
            fits = (
                number
                for number, length in enumerate(self.lengths)
                if length == position > 0 and number not in self.ended and number not in found
            )
            if (number := next(fits, len(self.lengths))) == len(self.lengths):
                self.lengths.append(position)
            self.lengths[number] += count
            found.append(number)
        if decode:
            self.ended |= self.decoding - {*found}
            self.decoding = {*found}
        return found
