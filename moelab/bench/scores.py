"""What the small model can do, measured on library text and keys that its training never saw.

Three kinds of scores: questions with one right answer (exact match of the whole answer), language loss beside a
unigram and a bigram model of the same training text, and how evenly each router spreads its tokens. They go into
the model card, and a test holds the shipped weights to the card.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moelab import datasets
from moelab.datasets import Prompt
from moelab.progress import progress


def right_answers(model: Any, prompts: Sequence[Prompt], batch_size: int = 16) -> list[bool]:
    """For each prompt, whether greedy decoding gives exactly its answer.

    One forward pass a batch: greedy decoding reproduces the answer if and only if, with the answer given, every
    one of its tokens is the most likely next one. Prompt and answer are tokenised apart, as a user would.
    """
    right: list[bool] = []
    encode = model.tokenizer
    for first in progress(range(0, len(prompts), batch_size), "answering", unit="batch"):
        batch = prompts[first:first + batch_size]
        pairs = [(encode(p.text)["input_ids"], encode(p.answer)["input_ids"]) for p in batch]
        longest = max(len(q) + len(a) for q, a in pairs)
        ids = torch.zeros(len(pairs), longest, dtype=torch.long)            # [B, S], padded right: causal
        for row, (question, answer) in enumerate(pairs):
            ids[row, :len(question) + len(answer)] = torch.tensor(question + answer)
        with torch.no_grad():
            best = model(ids.to(model.device), use_cache=False).logits.argmax(-1).cpu()      # [B, S]
        for row, (question, answer) in enumerate(pairs):
            predicted = best[row, len(question) - 1:len(question) + len(answer) - 1]
            right.append(predicted.tolist() == answer)
    return right


def text_windows(tokenizer: Any, split: str, n: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """`n` random windows of library text (code and manual, by length) as token ids [n, tokens]."""
    texts = [text for kind in ("code", "prose") for text in datasets.library(kind, split)]
    rng = random.Random(seed)
    picked = rng.choices(texts, weights=[len(text) for text in texts], k=4 * n)
    windows = []
    for text in picked:
        ids = tokenizer(text)["input_ids"]
        if len(ids) >= tokens:
            start = rng.randrange(len(ids) - tokens + 1)
            windows.append(ids[start:start + tokens])
        if len(windows) == n:
            return torch.tensor(windows)
    raise ValueError(f"the library has too few texts of {tokens} tokens; ask for shorter windows")


def language_loss(model: Any, windows: torch.Tensor, batch_size: int = 16) -> np.ndarray:
    """Mean next-token loss in nats of each window [n]; windows [n, S]."""
    losses = []
    for batch in windows.split(batch_size):
        with torch.no_grad():
            logits = model(batch.to(model.device), use_cache=False).logits.float().cpu()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        losses.append(loss.view(len(batch), -1).mean(1))
    return torch.cat(losses).numpy()


def ngram_losses(train: np.ndarray, windows: np.ndarray, vocabulary: int) -> tuple[float, float]:
    """Loss in nats of a unigram and of a bigram model fitted to `train` (token ids), on windows [n, S].

    Both are smoothed: the unigram by one count each, the bigram by the unigram with ten pseudo-counts.
    """
    train = train.astype(np.int64)
    unigram = np.bincount(train, minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1] * vocabulary + train[1:], minlength=vocabulary**2).reshape(vocabulary, vocabulary)
    previous, following = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    seen = pairs.sum(1)[previous]
    bigram = (pairs[previous, following] + 10 * unigram[following]) / (seen + 10)
    return float(-np.log(unigram[following]).mean()), float(-np.log(bigram).mean())


def score_small(model: Any, n: int = 300, tokens: int = 256, seed: int = 0) -> dict[str, Any]:
    """Every score of the model card: {name: value}; accuracies come with their standard errors.

    n : questions a task; tokens : context length S.
    """
    from moelab.models.small import corpus_ids
    from moelab.recording import record

    scores: dict[str, Any] = {"questions a task": n, "context": tokens}
    for task in ("needle", "needle_multikey", "lookup", "yesno"):
        share = float(np.mean(right_answers(model, datasets.prompts(task, n, tokens=tokens, seed=seed))))
        scores[task] = {"accuracy": share, "standard error": math.sqrt(share * (1 - share) / n)}
    windows = text_windows(model.tokenizer, "test", max(n // 4, 8), tokens, seed)
    loss = language_loss(model, windows)
    unigram, bigram = ngram_losses(corpus_ids(model.tokenizer), windows.numpy(), len(model.tokenizer))
    scores["language loss"] = {"model": float(loss.mean()),
                               "standard error": float(loss.std(ddof=1) / math.sqrt(len(loss))),
                               "bigram": bigram, "unigram": unigram}
    texts = [p.text for source in ("needle", "code", "prose") for p in datasets.prompts(source, 16, tokens=tokens)]
    counts = record(model, texts).counts().double()
    scores["load"] = {"max/mean by layer": (counts.amax(1) / counts.mean(1)).tolist(),
                      "dead experts": int((counts == 0).sum())}
    return scores
