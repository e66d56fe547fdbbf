"""The small trained model of this folder: its recipe, its scores and its card; `python data/train_small.py DESTINATION`.

A Qwen3-MoE of five million parameters, trained on CPU cores, so that everything in moelab runs without a network on a
model that has learned something: damage shows as wrong answers, which random weights cannot do.

What makes retrieval appear in so few steps: keys and values that are single tokens, written alike in fact and
question with nothing between them, so that one induction step answers; documents that are nothing but repetition,
to begin with; dense documents with many questions each; answers weighted up; contexts that grow from 32 to 512
tokens; rotary wavelengths that fit these contexts; and Muon for the attention matrices. With three-digit values in
three tokens, or an `=` between key and value, no retrieval was learned in 2,500 steps.

The load-balancing loss is taken layer by layer: pooled over layers, as transformers does it, it leaves experts that
no token ever reaches. A short second stage, from the rounded weights and with fresh optimizers, weighs it higher:
the first leaves single experts with more than three times the mean load.

Copying from the context takes attention alone: after two stages random experts cost retrieval nothing. A third stage
(half an hour of one core) asks what no context tells, so that experts must hold it: couples, spelling, sums. Beside
it, over half of the retrieval documents ask nothing but yes or no, with the claim after the key, so that it stands
where the fact has its value, first in contexts of 64 tokens. With the claim before the key, nothing was learned.

It costs some retrieval, of which a short fourth stage brings back a part.

The shipped weights: stages one and two ran with that older form of yes/no question, mixed with others; stages three
and four, each `--from` the result before, as they stand here. All four in one go were not run.

`--shape wide` trains another model, of twice as many and narrower experts in fewer layers: whether what was found on
the small one holds on it says `moelab bench recall_and_misses --model FOLDER`. `--shape broad` trains one on text alone,
of few experts whose rows are whole blocks of 256, as llama.cpp's K-quants want them. Neither is shipped.

Shapes: S tokens of context, B sequences a step with B·S = 2048 throughout, E experts, V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import moelab
from moelab.base import registry
from moelab.base.arguments import whole
from moelab.base.library import budget, library
from moelab.base.progress import progress
from moelab.evaluation import accuracy, questions
from moelab.evaluation.scores import text_windows

END = "<|endoftext|>"
TOKENS_A_STEP = 2048
MEMORY = (
    5,
    2,
    4,
)  # weights of `questions.REMEMBERED` among the questions that only weights can answer


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one context length and one mix of documents."""

    steps: int
    context: int  # S
    text: float  # share of plain library text
    echo: float  # share of repeated random words
    yesno: float  # share of yes/no questions; the documents that no other share takes are retrieval
    balance: float = 0.01  # coefficient of the load-balancing loss, a mean over layers
    memory: float = 0.0  # share of questions that only weights can answer


@dataclass(frozen=True)
class Stage:
    """Phases under one schedule of learning rates, relative to the recipe's; starts from the rounded weights of the
    stage before, with fresh optimizers."""

    phases: tuple[Phase, ...]
    rate: float = 1.0

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


STAGES = (
    Stage(
        (
            Phase(500, 32, text=0.20, echo=0.25, yesno=0.0),
            Phase(600, 64, text=0.35, echo=0.10, yesno=0.2),
            Phase(600, 128, text=0.45, echo=0.05, yesno=0.3),
            Phase(1500, 256, text=0.50, echo=0.0, yesno=0.3),
            Phase(500, 512, text=0.50, echo=0.0, yesno=0.3),
        )
    ),
    Stage((Phase(450, 256, text=0.60, echo=0.0, yesno=0.3, balance=0.4),), rate=0.33),
    Stage(
        (
            Phase(500, 64, text=0.15, echo=0.0, yesno=0.85, balance=0.1, memory=0.35),
            Phase(600, 128, text=0.20, echo=0.0, yesno=0.6, balance=0.1, memory=0.45),
            Phase(1000, 256, text=0.30, echo=0.0, yesno=0.5, balance=0.2, memory=0.40),
        ),
        rate=0.5,
    ),
    Stage((Phase(300, 256, text=0.40, echo=0.0, yesno=0.3, balance=0.2, memory=0.20),), rate=0.25),
)


#: name → where its model is of another shape than the recipe's
SHAPES = {
    "small": {},
    "wide": {"layers": 4, "experts": 64, "experts_per_token": 6, "intermediate": 32},
    "broad": {
        "stages": (Stage((Phase(300, 128, text=1.0, echo=0.0, yesno=0.0, balance=0.05),)),),
        "layers": 3,
        "experts": 8,
        "experts_per_token": 2,
        "hidden": 256,
        "intermediate": 256,
    },
}


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, the library text of this Python version apart."""

    seed: int = 0
    stages: tuple[Stage, ...] = STAGES
    learning_rate: float = 3e-3  # AdamW
    muon_rate: float = 0.02  # Muon, for the attention matrices
    warmup: int = 60
    weight_decay: float = 0.05
    answer_weight: float = 3.0  # loss weight of an answer's tokens
    other_weight: float = 0.3  # loss weight of the other tokens of echo and retrieval documents
    vocabulary: int = 1024
    hidden: int = 128
    intermediate: int = 64
    layers: int = 6
    experts: int = 32
    experts_per_token: int = 4

    @property
    def starts(self) -> list[int]:
        """The first step of each stage and, at the end, the number of steps of all."""
        return list(accumulate((stage.steps for stage in self.stages), initial=0))

    @property
    def steps(self) -> int:
        return self.starts[-1]

    def phase(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        for phase in (phase for stage in self.stages for phase in stage.phases):
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise IndexError("the recipe has no such step")

    def rate(self, step: int) -> float:
        """Factor of the learning rates: in each stage a linear warm-up, then a cosine from 1 to 0.1."""
        start, stage = [pair for pair in zip(self.starts, self.stages) if pair[0] <= step][-1]
        step -= start
        if step < self.warmup:
            return stage.rate * (step + 1) / self.warmup
        return stage.rate * (
            0.55
            + 0.45 * math.cos(math.pi * (step - self.warmup) / max(stage.steps - self.warmup, 1))
        )

    def shrunk(self, steps: int) -> Recipe:
        """A trial of about so many steps: every phase, and the warm-up, in proportion."""
        share = steps / self.steps

        def shorter(stage: Stage) -> Stage:
            return replace(
                stage,
                phases=tuple(
                    replace(phase, steps=max(1, round(phase.steps * share)))
                    for phase in stage.phases
                ),
            )

        return replace(
            self, warmup=max(1, round(self.warmup * share)), stages=tuple(map(shorter, self.stages))
        )


def train_tokenizer(vocabulary: int):
    """Byte-level BPE on the training split of the library and on lists of the words of the facts.

    The lists make each of these words and numbers one token. A longer number falls apart into pairs of digits.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    lists = "\nthe\nis " + " ".join(
        questions.ADJECTIVES + questions.NOUNS + questions.NUMBERS + ["yes", "no"]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text for kind in ("code", "prose") for text in library(kind, "train")] + [lists] * 3000,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def build_model(recipe: Recipe, seed: int | None = None) -> torch.nn.Module:
    """The untrained model, fp32, with transformers' fastest experts for training on a CPU."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=4 * recipe.intermediate,
        moe_intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(recipe.seed if seed is None else seed)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="grouped_mm")


# ------------------------------------------------------------------------------------------------------
# training


def corpus_ids(tokenizer) -> np.ndarray:
    """The training split of the library as one stream of token ids, texts separated by END: uint16 [tokens]."""
    texts = [text for kind in ("code", "prose") for text in library(kind, "train")]
    random.Random(0).shuffle(texts)
    stream: list[int] = []
    for encoding in tokenizer._tokenizer.encode_batch_fast(texts):
        stream += encoding.ids
        stream.append(0)
    return np.asarray(stream, dtype=np.uint16)


def retrieval_pieces(
    rng: random.Random, tokens: int, yesno: float, count: Callable[[str], int]
) -> list[tuple[str, bool]]:
    """One retrieval document of the small model's training mix, as [(text, is_answer)].

    Two thirds are *dense*: two to eight facts, then questions about them until `tokens` are full; one third
    are *buried*: one to four facts in library text, each asked for once. One answer in 256 tokens alone is
    too thin a signal to learn retrieval from; the dense ones carry it. `yesno` is the share of yes/no questions, in
    dense ones of documents that ask nothing else: there, false claims would be copied as if they were facts.
    """
    dense = rng.random() < 2 / 3
    claims = rng.random() < yesno
    facts = questions.invent_facts(
        rng,
        rng.randint(2, max(2, min(8, tokens // 12)))
        if dense
        else rng.randint(1, max(1, min(4, tokens // 40))),
        "train",
    )
    if not dense:
        asked = [
            questions.ask(rng, f, facts, rng.random() < yesno)
            for f in rng.sample(facts, len(facts))
        ]
        return questions.bury(rng, facts, asked, tokens, "train", count)
    pieces = [(f.statement, False) for f in facts]
    fits = budget(tokens - sum(count(text) for text, _ in pieces), count)
    while True:
        for fact in rng.sample(facts, len(facts)):
            question, answer = questions.ask(rng, fact, facts, claims)
            if not fits(question + answer):
                return pieces
            pieces += [(question, False), (answer, True)]


def memory_pieces(
    rng: random.Random, tokens: int, count: Callable[[str], int]
) -> list[tuple[str, bool]]:
    """Questions that only weights can answer, as [(text, is_answer)]: two thirds of the documents are full of them,
    the others have one to four after library text."""

    def ask() -> tuple[str, str]:
        return questions.remember(rng, rng.choices(questions.REMEMBERED, MEMORY)[0])

    if rng.random() < 1 / 3:
        return questions.bury(
            rng,
            [],
            [ask() for _ in range(rng.randint(1, max(1, min(4, tokens // 40))))],
            tokens,
            "train",
            count,
        )
    pieces, fits = [], budget(tokens, count)
    while fits("".join(asked := ask())):
        pieces += [(asked[0], False), (asked[1], True)]
    return pieces


def echo_pieces(rng: random.Random, tokens: int) -> list[tuple[str, bool]]:
    """Random words and numbers, then the same again, the second time as answers: teaches copying by itself."""
    words = [
        " " + word
        for word in rng.sample(
            questions.ADJECTIVES + questions.NOUNS + questions.NUMBERS,
            min(150, rng.randint(6, tokens // 2)),
        )
    ]
    half = words[: tokens // 2]
    return [(word, False) for word in half] + [(word, True) for word in half]


def batch(
    recipe: Recipe, step: int, stream: np.ndarray, count_ids: Callable[[str], list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step `step`'s sequences and loss weights, [B, S] each; a function of (recipe, step) alone.

    That is what makes an interrupted run continue as if nothing had happened.
    """

    def count(text: str) -> int:
        return len(count_ids(text))

    rng = random.Random(f"{recipe.seed}/{step}")
    phase = recipe.phase(step)
    length = phase.context
    ids = torch.zeros(TOKENS_A_STEP // length, length, dtype=torch.long)  # [B, S]
    weights = torch.zeros(ids.shape)  # [B, S]
    for row in range(len(ids)):
        kind = rng.random()
        if kind < phase.text:
            start = rng.randrange(len(stream) - length)
            ids[row] = torch.from_numpy(stream[start : start + length].astype(np.int64))
            weights[row] = 1.0
            continue
        pieces = (
            echo_pieces(rng, length)
            if kind < phase.text + phase.echo
            else memory_pieces(rng, length, count)
            if kind < phase.text + phase.echo + phase.memory
            else retrieval_pieces(rng, length, phase.yesno, count)
        )
        end = 0
        for text, is_answer in pieces:
            piece = count_ids(text)[: length - end]
            ids[row, end : end + len(piece)] = torch.tensor(piece)
            weights[row, end : end + len(piece)] = (
                recipe.answer_weight if is_answer else recipe.other_weight
            )
            end += len(piece)
    return ids, weights


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy under token weights; logits [B, S, V], ids and weights [B, S]."""
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    w = weights[:, 1:].flatten()
    return (losses * w).sum() / w.sum()


def balance_loss(router_logits: tuple[torch.Tensor, ...], k: int) -> torch.Tensor:
    """Mean over layers of E·Σ_e f_e·P_e (Switch Transformers eq. 4): f the routed share, P the mean probability.

    router_logits: per layer [T, E].
    """
    terms = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.topk(k, dim=-1).indices
        share = (
            torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(0) / k
        )  # [E], sums to 1
        terms.append(logits.shape[-1] * (share * probabilities.mean(0)).sum())
    return torch.stack(terms).mean()


def train_small(
    destination: str | Path,
    recipe: Recipe = Recipe(),
    *,
    start: str | Path | None = None,
    save_every: int = 100,
    stop_after: int | None = None,
) -> Path:
    """Train the small model and write a bf16 checkpoint that plain transformers loads.

    An interrupted run leaves `DESTINATION.training/`; called again with the same arguments, it goes on from the
    last save. `stop_after` ends the call after that many steps, as an interruption would. Returns `destination`.

    start : a checkpoint of all stages but the last, which alone is run, with its tokenizer.

    Raises
    ------
    FileExistsError : the destination exists, or unfinished training of another recipe lies beside it.
    ValueError : `start` is of another shape than the recipe's model.
    """
    destination = Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists and is not overwritten; name a new folder")
    work = destination.with_name(destination.name + ".training")
    work.mkdir(parents=True, exist_ok=True)
    written, wanted = (
        work / "recipe.json",
        json.dumps(asdict(recipe) | {"start": start and digest(start)}, indent=1),
    )
    if written.exists() and written.read_text() != wanted:
        raise FileExistsError(
            f"{work} holds an unfinished training by another recipe; delete it to start over"
        )
    written.write_text(wanted)

    if (work / "tokenizer").exists() or start:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(start or work / "tokenizer")
    else:
        tokenizer = train_tokenizer(recipe.vocabulary)
        tokenizer.save_pretrained(work / "tokenizer.part")
        os.replace(work / "tokenizer.part", work / "tokenizer")
    stream = corpus_ids(tokenizer)
    count_ids = _cached_ids(tokenizer)
    model = build_model(recipe)
    optimizers = _optimizers(model, recipe)
    state, first = work / "state.pt", 0
    if start:
        first = recipe.starts[-2]
        try:
            model.load_state_dict(
                type(model).from_pretrained(start, dtype=torch.float32).state_dict()
            )
        except RuntimeError as error:
            raise ValueError(
                f"the weights in {start} do not fit this recipe's model: {error}"
            ) from error
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, entry in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(entry)
        first = saved["step"]

    last = recipe.steps if stop_after is None else min(recipe.steps, first + stop_after)
    with progress(total=recipe.steps, desc="training", unit="step", initial=first) as bar:
        for step in range(first, last):
            if step in recipe.starts[1:]:
                for (
                    parameter
                ) in model.parameters():  # not model.to(bf16): that would round RoPE's buffers too
                    parameter.data.copy_(parameter.data.bfloat16())
                optimizers = _optimizers(model, recipe)
            for optimizer, rate in zip(optimizers, (recipe.learning_rate, recipe.muon_rate)):
                optimizer.param_groups[0]["lr"] = rate * recipe.rate(step)
            ids, weights = batch(recipe, step, stream, count_ids)
            out = model(ids, output_router_logits=True, use_cache=False)
            loss = weighted_loss(out.logits, ids, weights)
            balance = recipe.phase(step).balance * balance_loss(
                out.router_logits, recipe.experts_per_token
            )
            (loss + balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            bar.update()
            bar.note(f"S={ids.shape[1]} loss={loss.item():.3f}")
            if (step + 1) % save_every == 0 or step + 1 == last:
                torch.save(
                    {
                        "model": model.state_dict(),
                        "optimizers": [o.state_dict() for o in optimizers],
                        "step": step + 1,
                    },
                    work / "state.new",
                )
                os.replace(work / "state.new", state)
    if last < recipe.steps:
        return destination
    part = work / "checkpoint"
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, destination)
    shutil.rmtree(work)
    return destination


def digest(folder: str | Path) -> str:
    """The first 16 hex digits of the SHA-256 of a checkpoint's weights, which say which they are."""
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()[:16]


def _optimizers(
    model: torch.nn.Module, recipe: Recipe
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """AdamW for everything but the attention matrices, Muon for these: it halves the steps to induction."""
    attention = {
        name: p for name, p in model.named_parameters() if ".self_attn." in name and p.dim() == 2
    }
    rest = [p for name, p in model.named_parameters() if name not in attention]
    return (
        torch.optim.AdamW(
            rest,
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=True,
        ),
        torch.optim.Muon(attention.values(), lr=recipe.muon_rate, weight_decay=recipe.weight_decay),
    )


def _cached_ids(tokenizer) -> Callable[[str], list[int]]:
    return lru_cache(maxsize=200_000)(lambda text: tokenizer._tokenizer.encode(text).ids)


# ---------------------------------------------------------------------------------------------
# scores and the card


def ngram_losses(train: np.ndarray, windows: np.ndarray, vocabulary: int) -> tuple[float, float]:
    """Loss in nats of a unigram and of a bigram model fitted to `train` (token ids), on windows [n, S].

    Both are smoothed: the unigram by one count each, the bigram by the unigram with ten pseudo-counts.
    """
    train = train.astype(np.int64)
    unigram = np.bincount(train, minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1] * vocabulary + train[1:], minlength=vocabulary**2).reshape(
        vocabulary, vocabulary
    )
    previous, following = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    seen = pairs.sum(1)[previous]
    bigram = (pairs[previous, following] + 10 * unigram[following]) / (seen + 10)
    return float(-np.log(unigram[following]).mean()), float(-np.log(bigram).mean())


#: task of the card → what it asks
ASKED = {
    "needle": "one fact in library text",
    "needle_multikey": "four facts in library text, one asked for",
    "lookup": "eight facts and nothing else",
    "yesno": "yes or no about one of four facts; guessing gives 50 %",
    "couples": "who goes with an animal, of 512 couples",
    "spelling": "the letters of one of 64 words",
    "sums": "one of 900 sums modulo 10",
}


def damage(model: Any) -> dict[str, Callable[[], Any]]:
    """The modes of the card: the model as it is, and in two ways in which it must not be able to do the same."""
    from moelab.speculate import Speculation

    return {
        "as it is": nullcontext,
        "random experts": lambda: Speculation(
            model, registry.make("predictor", "random", model), "speculative", True
        ),
        "half of the routings": partial(
            moelab.using, model, executor="capacity", factor=0.5, order="random"
        ),
    }


def score_small(model: Any, n: int = 100, tokens: int = 256, seed: int = 0) -> dict[str, Any]:
    """Everything that the model card tells: `accuracy.compare` of `damage`'s modes, n-gram losses, the experts' load.

    n : questions a task; tokens : context length S.
    """
    windows = max(n // 4, 8)
    unigram, bigram = ngram_losses(
        corpus_ids(model.tokenizer),
        text_windows(model.tokenizer, "test", windows, tokens, seed).numpy(),
        len(model.tokenizer),
    )
    texts = [
        p.text for source in questions.SOURCES for p in questions.prompts(source, 16, tokens=tokens)
    ]
    counts = moelab.record(model, texts).counts().double()
    found = accuracy.compare(
        model,
        damage(model),
        ["loss", *ASKED],
        n=n,
        windows=windows,
        tokens=tokens,
        seed=seed,
        batch_size=1,
    )
    return {
        "questions a task": n,
        "context": tokens,
        "tasks": found["scores"],
        "language loss": {
            "model": found["scores"]["loss"]["as it is"]["score"],
            "bigram": bigram,
            "unigram": unigram,
        },
        "load": {
            "max/mean by layer": (counts.amax(1) / counts.mean(1)).tolist(),
            "dead experts": int((counts == 0).sum()),
        },
    }


CARD = """# The small model

A Qwen3-MoE of {parameters:.1f} million parameters, trained on CPU cores so that everything in moelab runs, within
minutes and without a network, on a model that has learned something, and that damage shows. It completes Python code,
finds facts that are stated in its context, knows a few things by heart, and is good for nothing else.

| | |
|---|---|
| architecture | `qwen3_moe`: {layers} MoE layers, {experts} experts, top-{experts_per_token} |
| sizes | H {hidden}, I {intermediate}, vocabulary {vocabulary} |
| files | {size:.1f} MB of bf16 safetensors, config, tokenizer: plain `transformers` opens the folder |
| trained on | the sources and manual pages of Python {python}'s standard library, and generated facts and questions |
| recipe | `data/train_small.py`: {steps:,} steps of 2,048 tokens in {stages} stages, contexts of {contexts} tokens |
| run for these weights | {run} |

## What it scores, and what damage costs

*Measured* on {questions} questions a task in contexts of {context} tokens. No library file, manual page or key of a
stated fact occurred in training; couples, words and sums did, as weights are to hold them.

| task | right answers | random experts, points | half of the routings, points |
|---|---|---|---|
{rows}

*Random experts*: after the first layer, the experts that run are drawn at random
(`evaluate --modes speculative:random`). *Half of the routings*: each expert keeps at most half of the mean load, drawn
at random, and the rest is dropped (`evaluate --modes executor:capacity:factor=0.5:order=random`).

Language loss on unseen library text: **{loss:.2f}** nats a token (standard error {loss_error:.2f}); a bigram model of
the same training text has {bigram:.2f}, a unigram model {unigram:.2f}.

Busiest expert over mean load, layer by layer: {load}; {dead} experts are never used.

## Licence

The weights are moelab's (Apache-2.0); the text they were trained on is Python's (PSF licence).
"""


def write_card(
    folder: Path, recipe: Recipe, scores: dict[str, Any], parameters: int, start: str | None
) -> Path:
    """Write `README.md` (for people) and `card.json` (recipe and scores) into the checkpoint's folder."""

    def row(task: str) -> str:
        of = scores["tasks"][task]
        costs = [
            f"{100 * of[mode]['difference']:+.1f} ± {100 * of[mode]['difference error']:.1f}"
            for mode in list(of)[1:]
        ]
        return (
            f"| {ASKED[task]} (`{task}`) | {100 * of['as it is']['score']:.1f} % ± "
            f"{100 * of['as it is']['error']:.1f} | {' | '.join(costs)} |"
        )

    loss, load, python = scores["language loss"], scores["load"], platform.python_version()
    text = CARD.format(
        **{k: v for k, v in asdict(recipe).items() if k != "stages"},
        rows="\n".join(map(row, ASKED)),
        parameters=parameters / 1e6,
        steps=recipe.steps,
        stages=len(recipe.stages),
        python=python,
        contexts=", ".join(str(phase.context) for stage in recipe.stages for phase in stage.phases),
        run=f"the last stage ({recipe.stages[-1].steps:,} steps), from the weights of {start}"
        if start
        else "all stages",
        size=sum(f.stat().st_size for f in folder.iterdir()) / 1e6,
        questions=scores["questions a task"],
        context=scores["context"],
        loss=loss["model"],
        loss_error=scores["tasks"]["loss"]["as it is"]["error"],
        bigram=loss["bigram"],
        unigram=loss["unigram"],
        load=", ".join(f"{ratio:.2f}" for ratio in load["max/mean by layer"]),
        dead=load["dead experts"] or "no",
    )
    (folder / "card.json").write_text(
        json.dumps(
            {"recipe": asdict(recipe), "start": start, "python": python, "scores": scores}, indent=1
        )
        + "\n"
    )
    path = folder / "README.md"
    path.write_text(text)
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "destination", type=Path, help="a new folder; an interrupted training goes on where it was"
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="FOLDER",
        help="run the last stage alone, from a checkpoint of those before",
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="small", help="of the model (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=whole(), default=0, help="of the weights and the data (%(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=whole(1),
        metavar="N",
        help="shrink the training to about N steps, every phase in proportion; for a trial",
    )
    parser.add_argument(
        "--threads",
        type=whole(1),
        default=1,
        help="CPU threads; the same weights come out only with the same number (%(default)s)",
    )
    args = parser.parse_args(arguments)
    recipe = Recipe(seed=args.seed, **SHAPES[args.shape])
    if args.steps is not None:
        if args.steps < (phases := sum(len(stage.phases) for stage in recipe.stages)):
            parser.error(
                f"--steps is {args.steps}; the training has {phases} phases, each of at least "
                "one step"
            )
        recipe = recipe.shrunk(args.steps)
    torch.set_num_threads(args.threads)
    start = args.start and f"SHA-256 {digest(args.start)}…"
    folder = train_small(args.destination, recipe, start=args.start)
    model = moelab.open_model(folder)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{folder} is ready; "
        f"{write_card(folder, recipe, score_small(model), parameters, start)} says what it "
        "can do"
    )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"train_small: {error}")
