"""Prompts from many sources behind one function: `prompts(source, n, ...)`.

They are made of Python's standard library and of facts that are invented on the spot:

    needle           one fact buried in library text, asked for at the end   (RULER niah_single, in small)
    needle_multikey  four facts buried in library text, one asked for        (RULER niah_multikey, in small)
    lookup           nothing but facts, one asked for
    yesno            four facts buried in library text, a yes/no question about one
    couples          library text, then the start of a couple, `the red fox and the`
    spelling, sums   the same with a word to spell and a sum modulo 10
    arithmetic       solved sums, then one to solve, as GSM8K is asked with examples
    knowledge        solved couples and spellings, then one to solve, as MMLU is
    code, prose      a passage of library source or manual; the answer is the rest of the last line

A fact is a line `the red fox 37`; the question repeats it up to the number, or reads `is the red
fox 37?`. What those from couples on ask stands nowhere in the prompt: weights must hold it.

Texts of your own, or of a data set of the hub, need none of this: `moelab.record` takes lists of
texts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from moelab.base.files import small_model
from moelab.base.library import Count, budget, in_split, passage
from moelab.base.registry import require

#: the words of invented facts
_ADJECTIVES = """
    amber azure blue brave bright calm clear cold cool dark deep dry fast fine flat gold gray
    green high icy kind late lazy loud mild neat new odd old pale pink red
"""
_NOUNS = """
    ant ape bat bear bee bird boar bull calf cat cow crab crow deer dog dove duck eel elk fish fly
    fox frog goat hare hawk hen ibex lamb lark lion lynx
"""
ADJECTIVES = _ADJECTIVES.split()
NOUNS = _NOUNS.split()
NUMBERS = [str(number) for number in range(10, 100)]
COUPLES = [f"{adjective} {noun}" for adjective in ADJECTIVES[:16] for noun in NOUNS]
SUMMANDS = range(10, 40)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the right continuation, "" for none."""

    source: str
    text: str
    answer: str = ""


@dataclass(frozen=True)
class Fact:
    """One invented fact, `the {key} {value}`, and the ways in which it is stated and asked for."""

    key: str
    value: str

    @property
    def statement(self) -> str:
        return f"\nthe {self.key} {self.value}"

    def question(self, claimed: str | None = None) -> tuple[str, str]:
        """(question, answer): the value itself or, with `claimed`, whether the value is
        `claimed`."""
        if claimed is None:
            return f"\nthe {self.key}", f" {self.value}"
        return f"\nis the {self.key} {claimed}?", " yes" if claimed == self.value else " no"


def prompts(
    source: str | Sequence[str],
    n: int = 32,
    *,
    tokens: int = 256,
    seed: int = 0,
    split: str = "test",
    count: Count | None = None,
) -> list[Prompt]:
    """`n` prompts of a source (a key of `SOURCES`), or of each of several, the same for the same
    arguments.

    tokens : the longest prompt, answer included, in tokens of `count`; filled up to the last line
        that fits.
    seed : picks facts, files and positions.
    split : "train" or "test"; the two share no file and no key, but all couples, spellings and
        sums: what weights must hold is to be held of all of them.
    count : text → number of tokens; by default the shipped small model's tokenizer counts.

    Raises ValueError: unknown source or split, `n` or `tokens` too small."""
    if not isinstance(source, str):
        return [
            prompt
            for one in source
            for prompt in prompts(one, n, tokens=tokens, seed=seed, split=split, count=count)
        ]
    require("prompt source", source, SOURCES)
    require("split", split, ("train", "test"))
    if n < 1 or tokens < 64:
        raise ValueError(
            f"n is {n} and tokens {tokens}; ask for at least one prompt, of at least 64 tokens to "
            "hold its facts and question"
        )
    count = count or _small_token_count()
    seeds = (f"{source}/{split}/{seed}/{i}" for i in range(n))
    return [SOURCES[source](source, random.Random(one), tokens, split, count) for one in seeds]


def invent_facts(rng: random.Random, n: int, split: str) -> list[Fact]:
    """`n` facts with different keys (adjective and noun) and values; the two splits share words,
    but no pair."""
    keys: list[str] = []
    while len(keys) < n:
        key = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        if key not in keys and in_split(key, split, share=4):
            keys.append(key)
    return [Fact(key, value) for key, value in zip(keys, rng.sample(NUMBERS, n))]


def ask(rng: random.Random, fact: Fact, facts: list[Fact], yesno: bool) -> tuple[str, str]:
    """A question about `fact`: its value, or yes/no with right, swapped and random claims (1/2,
    1/4, 1/4)."""
    if not yesno:
        return fact.question()
    others = [f.value for f in facts if f is not fact] or NUMBERS
    wrong = rng.choice(others) if rng.random() < 0.5 else rng.choice(NUMBERS)
    return fact.question(fact.value if rng.random() < 0.5 else wrong)


def remember(rng: random.Random, source: str) -> tuple[str, str]:
    """(question, answer) of "couples", "spelling" or "sums": the weights know the answer, or
    nothing does.

    A hash picks the partner of each of `COUPLES`, so that no rule but memory gives it.
    """
    if source == "couples":
        key = rng.choice(COUPLES)
        return f"\nthe {key} and the", " " + NOUNS[
            hashlib.sha1(f"couple {key}".encode()).digest()[0] % len(NOUNS)
        ]
    if source == "spelling":
        word = rng.choice(ADJECTIVES + NOUNS)
        return f"\nspell {word}:", " " + "-".join(word)
    a, b = rng.choices(SUMMANDS, k=2)
    return f"\nmod 10: {a} + {b} =", f" {(a + b) % 10}"


def bury(
    rng: random.Random,
    facts: list[Fact],
    questions: list[tuple[str, str]],
    tokens: int,
    split: str,
    count: Count,
) -> list[tuple[str, bool]]:
    """Library text up to `tokens`, the facts between its lines, the questions at the end, as
    [(text, is_answer)]."""
    room = tokens - sum(count(f.statement) for f in facts) - sum(count(q + a) for q, a in questions)
    body = passage(rng, "code" if rng.random() < 0.8 else "prose", split, budget(room, count))
    for fact in facts:
        body.insert(rng.randint(0, len(body)), fact.statement)
    return [(line, False) for line in body] + [
        piece for q, a in questions for piece in ((q, False), (a, True))
    ]


# Each kind of generated source makes one prompt.


def _asked(source: str, rng: random.Random, tokens: int, split: str, count: Count) -> Prompt:
    """A question about facts that stand in the prompt, or one that only weights can answer; before
    it library text, but for "lookup"."""
    n = {"needle": 1, "needle_multikey": 4, "yesno": 4, "lookup": min(8, tokens // 12)}
    facts = invent_facts(rng, n.get(source, 0), split)
    if facts:
        question, answer = ask(rng, rng.choice(facts), facts, yesno=source == "yesno")
    else:
        question, answer = remember(rng, source)
    if source == "lookup":
        text = "".join(f.statement for f in facts) + question
    else:
        pieces = bury(rng, facts, [(question, "")], tokens - count(answer), split, count)
        text = "".join(piece for piece, _ in pieces)
    return Prompt(source, text, answer)


def _solved(source: str, rng: random.Random, tokens: int, split: str, count: Count) -> Prompt:
    """Solved questions that only weights can answer, then one to solve."""
    examples = ""
    fits = budget(tokens, count)
    question, answer = remember(rng, rng.choice(SOLVED[source]))
    fits(question + answer)
    while fits(example := "".join(remember(rng, rng.choice(SOLVED[source])))):
        examples += example
    return Prompt(source, examples + question, answer)


def _passages(source: str, rng: random.Random, tokens: int, split: str, count: Count) -> Prompt:
    """A passage of the library; the answer is the last word of its last line."""
    lines: list[str] = []
    while len(lines) < 2 or len(lines[-1].split()) < 2:  # the last line is cut in two
        lines = passage(rng, source, split, budget(tokens, count))
    head, _, answer = lines[-1].rpartition(" ")
    return Prompt(source, "".join(lines[:-1]) + head, " " + answer)


def _small_token_count() -> Count:
    """text → number of tokens of the shipped model's tokenizer; needs neither torch nor
    transformers' models."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(small_model() / "tokenizer.json"))
    return lru_cache(maxsize=200_000)(lambda text: len(tokenizer.encode(text).ids))


REMEMBERED = ("couples", "spelling", "sums")
SOLVED = {"arithmetic": ("sums",), "knowledge": ("couples", "spelling")}  # what their prompts ask
#: source → what makes a prompt of it
SOURCES: dict[str, Callable[..., Prompt]] = {
    **dict.fromkeys(("needle", "needle_multikey", "lookup", "yesno", *REMEMBERED), _asked),
    **dict.fromkeys(SOLVED, _solved),
    **dict.fromkeys(("code", "prose"), _passages),
}
