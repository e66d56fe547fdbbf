"""Prompts: right answers, unseen keys and text, lengths."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moelab
from moelab.base.library import in_split, library, passages
from moelab.evaluation import questions


def words(text: str) -> int:
    """A crude token count that needs no model: words, numbers, signs and newlines."""
    return len(re.findall(r"\w+|[^\w ]", text))


@pytest.mark.parametrize("source", questions.SOURCES)
def test_prompts_are_reproducible_and_fit(source):
    first, again = (questions.prompts(source, 8, tokens=200, seed=3, count=words) for _ in range(2))
    assert first == again
    assert first != questions.prompts(source, 8, tokens=200, seed=4, count=words)
    for prompt in first:
        assert prompt.source == source and prompt.answer
        assert words(prompt.text + prompt.answer) <= 200
        assert source == "lookup" or words(prompt.text) > 120  # up to the last line that fits
    how = {"tokens": 100, "count": words}
    both = questions.prompts(("yesno", source), 2, **how)
    assert both == [*questions.prompts("yesno", 2, **how), *questions.prompts(source, 2, **how)]


@given(
    seed=st.integers(0, 10**6),
    source=st.sampled_from(["needle", "needle_multikey", "lookup", "yesno"]),
)
def test_the_answer_is_the_one_the_facts_give(seed, source):
    """Reads the facts back out of the prompt with a regular expression and answers the question
    from them."""
    prompt = questions.prompts(source, 1, tokens=160, seed=seed, count=words)[0]
    *body, question = prompt.text.split("\n")
    facts = {m[1]: m[2] for line in body if (m := re.fullmatch(r"the (\w+ \w+) (\d\d)", line))}
    assert len(facts) == {"needle": 1, "needle_multikey": 4, "lookup": 8, "yesno": 4}[source]
    if source == "yesno":
        key, claimed = re.fullmatch(r"is the (\w+ \w+) (\d\d)\?", question).groups()
        assert prompt.answer == (" yes" if facts[key] == claimed else " no")
    else:
        assert prompt.answer == " " + facts[question.removeprefix("the ")]


@given(seed=st.integers(0, 10**6), source=st.sampled_from(questions.REMEMBERED))
def test_what_weights_must_hold_is_asked_after_library_text(seed, source):
    """Words and sums are answered by hand; a couple's partner is a noun."""
    prompt = questions.prompts(source, 1, tokens=100, seed=seed, count=words)[0]
    question, answer = prompt.text.rpartition("\n")[2], prompt.answer.strip()
    if source == "spelling":
        word = re.fullmatch(r"spell (\w+):", question)[1]
        assert answer.split("-") == list(word) and word in questions.ADJECTIVES + questions.NOUNS
    elif source == "sums":
        a, b = map(int, re.fullmatch(r"mod 10: (\d\d) \+ (\d\d) =", question).groups())
        assert int(answer) == (a + b) % 10
    else:
        assert re.fullmatch(r"the (\w+) (\w+) and the", question) and answer in questions.NOUNS


def test_library_answers_continue_the_text_and_splits_share_nothing():
    for kind in ("code", "prose"):
        train, test = (library(kind, split) for split in ("train", "test"))
        assert not set(train) & set(test) and len(test) > 10
        known = {line for text in test for line in text.split("\n")}
        texts = passages(kind, 3, 100, words)
        assert texts == passages(kind, 3, 100, words) and len(set(texts)) == 3
        assert all(50 < words(text) <= 100 for text in texts)
        for prompt in questions.prompts(kind, 5, tokens=128, count=words):
            *lines, last = (prompt.text + prompt.answer).strip("\n").split("\n")
            assert last in known and known.issuperset(lines)
    pairs = [f"{a} {n}" for a in questions.ADJECTIVES for n in questions.NOUNS]
    for split in ("train", "test"):
        keys = {pair for pair in pairs if in_split(pair, split, share=4)}
        how = {"tokens": 120, "split": split, "count": words}
        text = "".join(p.text for p in questions.prompts("needle_multikey", 20, **how))
        assert len(keys) > 100 and set(re.findall(r"\nthe (\w+ \w+) \d\d\n", text)) <= keys


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"source": "wiki"}, "no prompt source 'wiki'.*needle"),
        ({"source": "needle", "split": "dev"}, "train.*test"),
        ({"source": "needle", "n": 0}, "at least one"),
        ({"source": "needle", "tokens": 8}, "at least 64"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        moelab.prompts(**{"n": 1, "count": words, **arguments})
