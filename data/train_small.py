"""The small trained model of this folder: its recipe, its scores and its card; `python data/train_small.py DESTINATION`.

A Qwen3-MoE of five million parameters, trained on two CPU cores within the hour, so that everything in moelab runs
without a network on a model that has learned something: damage shows as wrong answers, which random weights cannot do.

What makes retrieval appear in so few steps: keys and values that are single tokens, written alike in fact and
question with nothing between them, so that one induction step answers; documents that are nothing but repetition,
to begin with; dense documents with many questions each; answers weighted up; contexts that grow from 32 to 512
tokens; rotary wavelengths that fit these contexts; and Muon for the attention matrices. With three-digit values in
three tokens, or an `=` between key and value, no retrieval was learned in 2,500 steps.

The load-balancing loss is taken layer by layer: pooled over layers, as transformers does it, it leaves experts that
no token ever reaches. A short second stage, from the rounded weights and with fresh optimizers, weighs it higher:
the first leaves single experts with more than three times the mean load.

Shapes: S tokens of context, B sequences a step with B·S = 2048 throughout, E experts, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import moelab
from moelab import datasets
from moelab.arguments import whole
from moelab.evaluation.scores import language_loss, right_answers, text_windows
from moelab.progress import progress

END = "<|endoftext|>"
TOKENS_A_STEP = 2048


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one context length and one mix of documents."""

    steps: int
    context: int        # S
    text: float         # share of plain library text
    echo: float         # share of repeated random words; the rest are retrieval documents
    yesno: float        # share of yes/no questions among the questions
    balance: float = 0.01       # coefficient of the load-balancing loss, a mean over layers


PHASES = (Phase(500, 32, text=0.20, echo=0.25, yesno=0.0), Phase(600, 64, text=0.35, echo=0.10, yesno=0.2),
          Phase(600, 128, text=0.45, echo=0.05, yesno=0.3), Phase(1500, 256, text=0.50, echo=0.0, yesno=0.3),
          Phase(500, 512, text=0.50, echo=0.0, yesno=0.3))


POLISH = Phase(450, 256, text=0.60, echo=0.0, yesno=0.3, balance=0.4)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, the library text of this Python version apart."""

    seed: int = 0
    phases: tuple[Phase, ...] = PHASES
    polish: Phase = POLISH          # the second stage
    polish_rate: float = 0.33       # its learning rates, relative to the first stage's
    learning_rate: float = 3e-3     # AdamW
    muon_rate: float = 0.02         # Muon, for the attention matrices
    warmup: int = 60
    weight_decay: float = 0.05
    answer_weight: float = 3.0      # loss weight of an answer's tokens
    other_weight: float = 0.3       # loss weight of the other tokens of echo and retrieval documents
    vocabulary: int = 1024
    hidden: int = 128
    intermediate: int = 64
    layers: int = 6
    experts: int = 32
    experts_per_token: int = 4

    @property
    def first_stage(self) -> int:
        """Steps of the first stage."""
        return sum(phase.steps for phase in self.phases)

    @property
    def steps(self) -> int:
        """Steps of both stages."""
        return self.first_stage + self.polish.steps

    def phase(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.polish

    def rate(self, step: int) -> float:
        """Factor of the learning rates: in each stage a linear warm-up, then a cosine from 1 to 0.1."""
        scale, steps = 1.0, self.first_stage
        if step >= steps:
            scale, step, steps = self.polish_rate, step - steps, self.polish.steps
        if step < self.warmup:
            return scale * (step + 1) / self.warmup
        return scale * (0.55 + 0.45 * math.cos(math.pi * (step - self.warmup) / max(steps - self.warmup, 1)))


def train_tokenizer(vocabulary: int):
    """Byte-level BPE on the training split of the library and on lists of the words of the facts.

    The lists make each of these words and numbers one token. A longer number falls apart into pairs of digits.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    lists = "\nthe\nis " + " ".join(datasets.ADJECTIVES + datasets.NOUNS + datasets.NUMBERS + ["yes", "no"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text for kind in ("code", "prose") for text in datasets.library(kind, "train")] + [lists] * 3000,
        trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], show_progress=False,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END,
                                   clean_up_tokenization_spaces=False)


def build_model(recipe: Recipe, seed: int | None = None) -> torch.nn.Module:
    """The untrained model, fp32, with transformers' fastest experts for training on a CPU."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=recipe.vocabulary, hidden_size=recipe.hidden, intermediate_size=4 * recipe.intermediate,
        moe_intermediate_size=recipe.intermediate, num_hidden_layers=recipe.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=recipe.experts, num_experts_per_tok=recipe.experts_per_token,
        norm_topk_prob=True, max_position_embeddings=2048, decoder_sparse_step=1, mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 200.0}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(recipe.seed if seed is None else seed)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="grouped_mm")


# ------------------------------------------------------------------------------------------------------ training

def corpus_ids(tokenizer) -> np.ndarray:
    """The training split of the library as one stream of token ids, texts separated by END: uint16 [tokens]."""
    texts = [text for kind in ("code", "prose") for text in datasets.library(kind, "train")]
    random.Random(0).shuffle(texts)
    stream: list[int] = []
    for encoding in tokenizer._tokenizer.encode_batch_fast(texts):
        stream += encoding.ids
        stream.append(0)
    return np.asarray(stream, dtype=np.uint16)


def retrieval_pieces(rng: random.Random, tokens: int, yesno: float, count: Callable[[str], int]
                     ) -> list[tuple[str, bool]]:
    """One retrieval document of the small model's training mix, as [(text, is_answer)].

    Two thirds are *dense*: two to eight facts, then questions about them until `tokens` are full; one third
    are *buried*: one to four facts in library text, each asked for once. One answer in 256 tokens alone is
    too thin a signal to learn retrieval from; the dense ones carry it. `yesno` is the share of yes/no questions.
    """
    dense = rng.random() < 2 / 3
    facts = datasets.invent_facts(rng, rng.randint(2, max(2, min(8, tokens // 12))) if dense
                         else rng.randint(1, max(1, min(4, tokens // 40))), "train")
    if not dense:
        questions = [datasets.ask(rng, f, facts, rng.random() < yesno) for f in rng.sample(facts, len(facts))]
        return datasets.bury(rng, facts, questions, tokens, "train", count)
    pieces = [(f.statement, False) for f in facts]
    fits = datasets.budget(tokens - sum(count(text) for text, _ in pieces), count)
    while True:
        for fact in rng.sample(facts, len(facts)):
            question, answer = datasets.ask(rng, fact, facts, rng.random() < yesno)
            if not fits(question + answer):
                return pieces
            pieces += [(question, False), (answer, True)]


def echo_pieces(rng: random.Random, tokens: int) -> list[tuple[str, bool]]:
    """Random words and numbers, then the same again, the second time as answers: teaches copying by itself."""
    words = [" " + word for word in rng.sample(
        datasets.ADJECTIVES + datasets.NOUNS + datasets.NUMBERS, min(150, rng.randint(6, tokens // 2)))]
    half = words[:tokens // 2]
    return [(word, False) for word in half] + [(word, True) for word in half]


def batch(recipe: Recipe, step: int, stream: np.ndarray, count_ids: Callable[[str], list[int]]
          ) -> tuple[torch.Tensor, torch.Tensor]:
    """Step `step`'s sequences and loss weights, [B, S] each; a function of (recipe, step) alone.

    That is what makes an interrupted run continue as if nothing had happened.
    """
    rng = random.Random(f"{recipe.seed}/{step}")
    phase = recipe.phase(step)
    length = phase.context
    ids = torch.zeros(TOKENS_A_STEP // length, length, dtype=torch.long)      # [B, S]
    weights = torch.zeros(ids.shape)                                          # [B, S]
    for row in range(len(ids)):
        kind = rng.random()
        if kind < phase.text:
            start = rng.randrange(len(stream) - length)
            ids[row] = torch.from_numpy(stream[start:start + length].astype(np.int64))
            weights[row] = 1.0
            continue
        pieces = (echo_pieces(rng, length) if kind < phase.text + phase.echo else
                  retrieval_pieces(rng, length, phase.yesno, lambda text: len(count_ids(text))))
        end = 0
        for text, is_answer in pieces:
            piece = count_ids(text)[:length - end]
            ids[row, end:end + len(piece)] = torch.tensor(piece)
            weights[row, end:end + len(piece)] = recipe.answer_weight if is_answer else recipe.other_weight
            end += len(piece)
    return ids, weights


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy under token weights; logits [B, S, V], ids and weights [B, S]."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
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
        share = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(0) / k      # [E], sums to 1
        terms.append(logits.shape[-1] * (share * probabilities.mean(0)).sum())
    return torch.stack(terms).mean()


def train_small(destination: str | Path, recipe: Recipe = Recipe(), *, save_every: int = 100,
                stop_after: int | None = None) -> Path:
    """Train the small model and write a bf16 checkpoint that plain transformers loads.

    An interrupted run leaves `DESTINATION.training/`; called again with the same recipe, it goes on from the
    last save. `stop_after` ends the call after that many steps, as an interruption would. Returns `destination`.

    Raises
    ------
    FileExistsError : the destination exists, or unfinished training of another recipe lies beside it.
    """
    destination = Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists and is not overwritten; name a new folder")
    work = destination.with_name(destination.name + ".training")
    work.mkdir(parents=True, exist_ok=True)
    written, wanted = work / "recipe.json", json.dumps(asdict(recipe), indent=1)
    if written.exists() and written.read_text() != wanted:
        raise FileExistsError(f"{work} holds an unfinished training by another recipe; delete it to start over")
    written.write_text(wanted)

    if (work / "tokenizer").exists():
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    else:
        tokenizer = train_tokenizer(recipe.vocabulary)
        tokenizer.save_pretrained(work / "tokenizer.part")
        os.replace(work / "tokenizer.part", work / "tokenizer")
    stream = corpus_ids(tokenizer)
    count_ids = _cached_ids(tokenizer)
    model = build_model(recipe)
    optimizers = _optimizers(model, recipe)
    state, first = work / "state.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, entry in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(entry)
        first = saved["step"]

    last = recipe.steps if stop_after is None else min(recipe.steps, first + stop_after)
    with progress(total=recipe.steps, desc="training", unit="step", initial=first) as bar:
        for step in range(first, last):
            if step == recipe.first_stage:
                for parameter in model.parameters():        # not model.to(bf16): that would round RoPE's buffers too
                    parameter.data.copy_(parameter.data.bfloat16())
                optimizers = _optimizers(model, recipe)
            for optimizer, rate in zip(optimizers, (recipe.learning_rate, recipe.muon_rate)):
                optimizer.param_groups[0]["lr"] = rate * recipe.rate(step)
            ids, weights = batch(recipe, step, stream, count_ids)
            out = model(ids, output_router_logits=True, use_cache=False)
            loss = weighted_loss(out.logits, ids, weights)
            balance = recipe.phase(step).balance * balance_loss(out.router_logits, recipe.experts_per_token)
            (loss + balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            bar.update()
            bar.note(f"S={ids.shape[1]} loss={loss.item():.3f}")
            if (step + 1) % save_every == 0 or step + 1 == last:
                torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                            "step": step + 1}, work / "state.new")
                os.replace(work / "state.new", state)
    if last < recipe.steps:
        return destination
    part = work / "checkpoint"
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, destination)
    shutil.rmtree(work)
    return destination


def _optimizers(model: torch.nn.Module, recipe: Recipe) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """AdamW for everything but the attention matrices, Muon for these: it halves the steps to induction."""
    attention = {name: p for name, p in model.named_parameters() if ".self_attn." in name and p.dim() == 2}
    rest = [p for name, p in model.named_parameters() if name not in attention]
    return (torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay,
                              fused=True),
            torch.optim.Muon(attention.values(), lr=recipe.muon_rate, weight_decay=recipe.weight_decay))


def _cached_ids(tokenizer) -> Callable[[str], list[int]]:
    return lru_cache(maxsize=200_000)(lambda text: tokenizer._tokenizer.encode(text).ids)


# --------------------------------------------------------------------------------------------- scores and the card

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
    counts = moelab.record(model, texts).counts().double()
    scores["load"] = {"max/mean by layer": (counts.amax(1) / counts.mean(1)).tolist(),
                      "dead experts": int((counts == 0).sum())}
    return scores


CARD = """# The small model

A Qwen3-MoE of {parameters:.1f} million parameters, trained from scratch on two CPU cores so that everything in
moelab runs, within minutes and without a network, on a model that has learned something. It completes Python code,
finds facts that are stated in its context, and is good for nothing else.

| | |
|---|---|
| architecture | `qwen3_moe`: {layers} MoE layers, {experts} experts, top-{experts_per_token} |
| sizes | H {hidden}, I {intermediate}, vocabulary {vocabulary} |
| files | {size:.1f} MB of bf16 safetensors, config, tokenizer: plain `transformers` opens the folder |
| trained on | the sources and manual pages of Python {python}'s standard library, and generated facts and questions |
| recipe | `data/train_small.py`; `python data/train_small.py DESTINATION` repeats it |
| steps | {steps:,} of 2,048 tokens, contexts of {contexts} tokens |

## What it scores

*Measured* on {questions} questions a task in contexts of {context} tokens. No library file, manual page or key of
these prompts occurred in training.

| task | right answers |
|---|---|
| one fact in library text (`needle`) | {needle} |
| four facts in library text, one asked for (`needle_multikey`) | {needle_multikey} |
| eight facts and nothing else (`lookup`) | {lookup} |
| yes or no about one of four facts (`yesno`; guessing gives 50 %) | {yesno} |

Language loss on unseen library text: **{loss:.2f}** nats a token (standard error {loss_error:.2f}); a bigram model of
the same training text has {bigram:.2f}, a unigram model {unigram:.2f}.

Busiest expert over mean load, layer by layer: {load}; {dead} experts are never used.

## Licence

The weights are moelab's (Apache-2.0); the text they were trained on is Python's (PSF licence).
"""


def write_card(folder: Path, recipe: Recipe, scores: dict[str, Any], parameters: int) -> Path:
    """Write `README.md` (for people) and `card.json` (recipe and scores) into the checkpoint's folder."""
    share = {task: f"{100 * scores[task]['accuracy']:.1f} % ± {100 * scores[task]['standard error']:.1f}"
             for task in ("needle", "needle_multikey", "lookup", "yesno")}
    loss, load = scores["language loss"], scores["load"]
    text = CARD.format(
        **{k: v for k, v in asdict(recipe).items() if k not in ("phases", "polish")}, **share,
        parameters=parameters / 1e6, steps=recipe.steps,
        contexts=", ".join(str(phase.context) for phase in (*recipe.phases, recipe.polish)),
        size=sum(f.stat().st_size for f in folder.iterdir()) / 1e6, python=platform.python_version(),
        questions=scores["questions a task"], context=scores["context"], loss=loss["model"],
        loss_error=loss["standard error"], bigram=loss["bigram"], unigram=loss["unigram"],
        load=", ".join(f"{ratio:.2f}" for ratio in load["max/mean by layer"]), dead=load["dead experts"] or "no")
    (folder / "card.json").write_text(json.dumps({"recipe": asdict(recipe), "python": platform.python_version(),
                                                  "scores": scores}, indent=1) + "\n")
    path = folder / "README.md"
    path.write_text(text)
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("destination", type=Path, help="a new folder; an interrupted training goes on where it was")
    parser.add_argument("--seed", type=whole(), default=0, help="of the weights and the data (%(default)s)")
    parser.add_argument("--steps", type=whole(1), metavar="N",
                        help="shrink the training to about N steps, every phase in proportion; for a trial")
    parser.add_argument("--threads", type=whole(1), default=1,
                        help="CPU threads; the same weights come out only with the same number (%(default)s)")
    args = parser.parse_args(arguments)
    recipe = Recipe(seed=args.seed)
    if args.steps is not None:
        if args.steps <= len(recipe.phases):
            parser.error(f"--steps is {args.steps}; the training has {len(recipe.phases) + 1} phases, each of at "
                             "least one step")
        share = args.steps / recipe.steps
        shorter = [replace(phase, steps=max(1, round(phase.steps * share)))
                   for phase in (*recipe.phases, recipe.polish)]
        recipe = replace(recipe, warmup=max(1, round(recipe.warmup * share)), phases=tuple(shorter[:-1]),
                         polish=shorter[-1])
    torch.set_num_threads(args.threads)
    folder = train_small(args.destination, recipe)
    model = moelab.open_model(folder)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder} is ready; {write_card(folder, recipe, score_small(model), parameters)} says what it can do")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"train_small: {error}")
