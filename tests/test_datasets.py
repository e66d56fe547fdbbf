"""Prompts: right answers, unseen keys and text, lengths, and what is said when a source cannot be
had."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moelab
from moelab import datasets


def words(text: str) -> int:
    """A crude token count that needs no model: words, numbers, signs and newlines."""
    return len(re.findall(r"\w+|[^\w ]", text))


@pytest.mark.parametrize("source", datasets.SOURCES)
def test_generated_prompts_are_reproducible_and_fit(source):
    first, again = (datasets.prompts(source, 8, tokens=200, seed=3, count=words) for _ in range(2))
    assert first == again
    assert first != datasets.prompts(source, 8, tokens=200, seed=4, count=words)
    for prompt in first:
        assert prompt.source == source and prompt.answer
        assert words(prompt.text + prompt.answer) <= 200
        if source != "lookup":
            assert words(prompt.text) > 120  # filled up to the last line that fits


def test_several_sources_give_so_many_prompts_each():
    how = {"tokens": 100, "seed": 5, "split": "train", "count": words}
    assert datasets.prompts(("yesno", "lookup"), 3, **how) == [
        *datasets.prompts("yesno", 3, **how),
        *datasets.prompts("lookup", 3, **how),
    ]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    source=st.sampled_from(["needle", "needle_multikey", "lookup", "yesno"]),
)
def test_the_answer_is_the_one_the_facts_give(seed, source):
    """Reads the facts back out of the prompt with a regular expression and answers the question
    from them."""
    prompt = datasets.prompts(source, 1, tokens=160, seed=seed, count=words)[0]
    *body, question = prompt.text.split("\n")
    facts = {m[1]: m[2] for line in body if (m := re.fullmatch(r"the (\w+ \w+) (\d\d)", line))}
    assert len(facts) == {"needle": 1, "needle_multikey": 4, "lookup": 8, "yesno": 4}[source]
    if source == "yesno":
        key, claimed = re.fullmatch(r"is the (\w+ \w+) (\d\d)\?", question).groups()
        assert prompt.answer == (" yes" if facts[key] == claimed else " no")
        assert prompt.choices == (" yes", " no")
    else:
        assert prompt.answer == " " + facts[question.removeprefix("the ")]


def test_yes_and_no_are_equally_likely():
    answers = [p.answer for p in datasets.prompts("yesno", 400, tokens=100, count=words)]
    assert 150 < answers.count(" yes") < 250


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), source=st.sampled_from(datasets.REMEMBERED))
def test_what_weights_must_hold_is_asked_after_library_text(seed, source):
    """Words and sums are answered by hand; a couple's partner is a noun, and the same whenever it
    is asked for."""
    prompt = datasets.prompts(source, 1, tokens=100, seed=seed, count=words)[0]
    question = prompt.text.rpartition("\n")[2]
    if source == "spelling":
        word = re.fullmatch(r"spell (\w+):", question)[1]
        assert (
            prompt.answer.strip().split("-") == list(word)
            and word in datasets.ADJECTIVES + datasets.NOUNS
        )
    elif source == "sums":
        a, b = map(int, re.fullmatch(r"mod 10: (\d\d) \+ (\d\d) =", question).groups())
        assert int(prompt.answer) == (a + b) % 10
    else:
        assert (
            re.fullmatch(r"the (\w+) (\w+) and the", question)
            and prompt.answer.strip() in datasets.NOUNS
        )


def test_an_animal_always_has_the_same_partner_in_both_splits():
    partners = {}
    for split in ("train", "test"):
        for prompt in datasets.prompts("couples", 400, tokens=64, split=split, count=words):
            key = prompt.text.rpartition("\n")[2]
            assert partners.setdefault(key, prompt.answer) == prompt.answer
    assert 300 < len(partners) <= len(datasets.COUPLES) and len(set(partners.values())) == len(
        datasets.NOUNS
    )


def test_library_answers_continue_the_text():
    for kind in ("code", "prose"):
        for prompt in datasets.prompts(kind, 5, tokens=128, count=words):
            *lines, last = (prompt.text + prompt.answer).strip("\n").split("\n")
            known = {line for text in datasets.library(kind, "test") for line in text.split("\n")}
            assert last in known and known.issuperset(lines)


def test_splits_share_nothing():
    for kind in ("code", "prose"):
        assert not set(datasets.library(kind, "train")) & set(datasets.library(kind, "test"))
        assert len(datasets.library(kind, "test")) > 10
    keys = {
        split: {
            f"{a} {n}"
            for a in datasets.ADJECTIVES
            for n in datasets.NOUNS
            if datasets.in_split(f"{a} {n}", split, share=4)
        }
        for split in ("train", "test")
    }
    assert not keys["train"] & keys["test"]
    assert min(map(len, keys.values())) > 100
    for split in keys:
        texts = [
            p.text
            for p in datasets.prompts("needle_multikey", 20, tokens=120, split=split, count=words)
        ]
        assert {m for t in texts for m in re.findall(r"\nthe (\w+ \w+) \d\d\n", t)} <= keys[split]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"source": "wiki"}, "unknown prompt source.*needle"),
        ({"source": "needle", "split": "dev"}, "train.*test"),
        ({"source": "needle", "n": 0}, "at least one"),
        ({"source": "needle", "tokens": 8}, "at least 64"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        moelab.prompts(**{"n": 1, "count": words, **arguments})
