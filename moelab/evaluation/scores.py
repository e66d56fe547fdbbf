"""Scores of a model: questions with one right answer (exact match of all its tokens), and language
loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moelab.base.library import library
from moelab.base.progress import progress
from moelab.evaluation.questions import Prompt


def split_ids(tokenizer: Any, prompt: Prompt) -> tuple[list[int], list[int]]:
    """(prompt, answer) as token ids, cut as lm-eval does: tokenised together and cut where the
    prompt alone would end; blanks that end the prompt go to the answer."""
    whole = tokenizer(prompt.text + prompt.answer)["input_ids"]
    n = len(tokenizer(prompt.text.rstrip())["input_ids"])
    return whole[:n], whole[n:]


def last_logits(model: Any, ids: torch.Tensor, n: int, decode: bool = False) -> torch.Tensor:
    """The logits [B, n, V] that predict the last `n` tokens of ids [B, S], each given all before
    it: from one forward pass or, with `decode`, from n decode steps after a prefill of the tokens
    before."""
    ids = ids.to(model.device)
    first = ids.shape[1] - n - 1  # the token whose logits predict the first of the n
    if first < 0 or decode and first < 1:
        raise ValueError(
            f"{n} of {ids.shape[1]} tokens cannot be predicted from tokens before them; ask "
            "for fewer"
        )
    with torch.no_grad():
        if not decode:
            return model(ids, use_cache=False).logits[:, first:-1]
        cache = model(ids[:, :first], use_cache=True).past_key_values
        logits = []
        for i in range(first, ids.shape[1] - 1):
            out = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, dim=1)


def right_answers(
    model: Any,
    prompts: Sequence[Prompt],
    batch_size: int = 16,
    decode: bool = False,
    label: str = "answering",
) -> list[bool]:
    """For each prompt, whether greedy decoding gives exactly its answer: whether, with the answer
    given, every token of it is the most likely next one. With `decode`, prompts run one at a time,
    answers in decode steps."""
    pairs = [split_ids(model.tokenizer, prompt) for prompt in prompts]
    by_length: dict[
        int, list[int]
    ] = {}  # batches of one length need no padding, which a router would see
    for i, (question, answer) in enumerate(pairs):
        by_length.setdefault(len(question) + len(answer), []).append(i)
    size = 1 if decode else batch_size
    right = [False] * len(pairs)
    with progress(total=len(pairs), desc=label, unit="prompt") as bar:
        for same in by_length.values():
            for batch in (same[at : at + size] for at in range(0, len(same), size)):
                answers = [pairs[i][1] for i in batch]
                ids = torch.tensor([pairs[i][0] + pairs[i][1] for i in batch])  # [B, S]
                best = last_logits(model, ids, max(map(len, answers)), decode).argmax(-1)  # [B, n]
                for i, answer, predicted in zip(batch, answers, best.tolist()):
                    right[i] = predicted[len(predicted) - len(answer) :] == answer
                bar.update(len(batch))
    return right


def text_windows(tokenizer: Any, split: str, n: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """`n` random windows of library text (code and manual, by length) as token ids [n, tokens]."""
    texts = [text for kind in ("code", "prose") for text in library(kind, split)]
    rng = random.Random(seed)
    picked = rng.choices(texts, weights=[len(text) for text in texts], k=4 * n)
    windows = []
    for ids in (tokenizer(text)["input_ids"] for text in picked):
        if len(ids) >= tokens:
            start = rng.randrange(len(ids) - tokens + 1)
            windows.append(ids[start : start + tokens])
        if len(windows) == n:
            return torch.tensor(windows)
    raise ValueError(f"the library has too few texts of {tokens} tokens; ask for shorter windows")


def language_loss(
    model: Any, windows: torch.Tensor, batch_size: int = 16, decode: int = 0, label: str = "reading"
) -> np.ndarray:
    """Mean next-token loss in nats of each window [n]; windows [n, S]. `decode` scores only so many
    last tokens of each, in decode steps, one window at a time; 0 scores all but the first in one
    forward pass."""
    losses = []
    scored = decode or windows.shape[1] - 1
    with progress(total=len(windows), desc=label, unit="window") as bar:
        for batch in windows.split(1 if decode else batch_size):
            logits = last_logits(model, batch, scored, decode > 0)
            for row, window in zip(
                logits, batch
            ):  # one by one: fp32 logits of a large vocabulary are large
                losses.append(F.cross_entropy(row.float().cpu(), window[-scored:]).item())
            bar.update(len(batch))
    return np.array(losses)
