"""The small trained model: a Qwen3-MoE of five million parameters, trained on two cores within the hour.

It is shipped in `data/small` so that everything in moelab runs without a network on a model that has really
learned something: damage done to it shows as wrong answers, which random weights cannot do. This file is the
whole recipe, and `python -m moelab train-small DESTINATION` repeats it.

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

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from moelab import datasets
from moelab.files import small_model
from moelab.progress import progress

SMALL = small_model()
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
        pieces = (datasets.echo_pieces(rng, length) if kind < phase.text + phase.echo else
                  datasets.retrieval_pieces(rng, length, phase.yesno, lambda text: len(count_ids(text))))
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
