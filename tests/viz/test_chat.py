"""A conversation in a notebook, without a browser: its answers, stop, memory that moves, what-ifs."""

import re
import time

import pytest

pytest.importorskip("anywidget")
import moelab
from moelab.viz import views
from tests.models import tiny

TEXT = "the red fox 37\nthe red"


@pytest.fixture(scope="module")
def lm():
    with moelab.open_model(memory="50%", prefetch="router") as lm:
        yield lm


@pytest.fixture
def talk(lm):
    lm.moelab.resize("50%")
    lm.moelab.reset()
    return views.chat(lm, 40)


def until(condition, seconds=60):
    """Wait for it."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds
        time.sleep(0.005)


def told(talk):
    """What was told last, of measured or simulated seconds and hit rates."""
    lines = [text for who, text in talk.log[-2:] if not who]
    return [
        (kind, float(hits))
        for line in lines
        for kind, hits in re.findall(r"^(measured|simulated): .*hit rate (\d+)%", line)
    ]


def test_an_answer_is_that_of_a_conversation(lm, talk):
    for text in (TEXT, "the blue cat"):
        talk.say(text).result()
    plain = moelab.Conversation(lm, 40)
    wanted = ["".join(plain.say(text)) for text in (TEXT, "the blue cat")]
    assert [text for who, text in talk.log if who == "model"] == [f"{text}\n" for text in wanted]
    assert talk.page.shown["log"] == [*map(tuple, talk.log)] and "tokens/s" in talk.log[-1][1]


def test_the_experts_are_those_of_the_latest_pass(lm, talk):
    talk.say(TEXT).result()
    here, routed, read = (set(map(tuple, keys)) for keys in talk.page.shown["experts"])
    last = lm.moelab.forwards[-1]
    assert routed == {(layer, e) for layer, experts in lm.moelab.steps[-1] for e in experts}
    inside = [event for event in lm.moelab.timeline if event.start >= last.start]
    assert read == {(e.layer, e.expert) for e in inside if e.kind.startswith("read")}
    assert here and talk.page.shown["shape"] == (lm.spec.L, lm.spec.E)


def test_stop_keeps_what_was_said(lm):
    talk = views.chat(lm, 2000)
    for text in (TEXT, "where is"):
        answer = talk.say(text)
        until(lambda: len(talk.log[-1][1]) > 20)
        talk.page._handle_custom_msg("", [])
        until(answer.done)
        said = [text for who, text in talk.log if who == "model"][-1]
        assert talk.talk.messages[-1]["content"].startswith(said.rstrip("\n")[:20])


def test_stop_before_the_first_token(lm):
    talk = views.chat(lm, 2000)
    before = len(lm.moelab.forwards)
    answer = talk.say("the red fox " * 40)
    time.sleep(0.02)
    talk.page._handle_custom_msg("", [])
    until(answer.done)
    assert len(lm.moelab.forwards) < before + 1000  # of 2,000 tokens
    talk.talk.max_new_tokens = 3
    talk.say(TEXT).result()
    assert talk.log[-2][1].strip()


def test_stop_at_once_ends_the_answer_that_is_asked_for_and_no_other(lm):
    talk = views.chat(lm, 200)
    for _ in range(5):
        before = len(lm.moelab.forwards)
        answer = talk.say(TEXT)
        talk.page._handle_custom_msg("", [])
        answer.result()
        assert len(lm.moelab.forwards) <= before + 2
    talk.page._handle_custom_msg("", [])
    talk.talk.max_new_tokens = 3
    before = len(lm.moelab.forwards)
    talk.say(TEXT).result()
    assert len(lm.moelab.forwards) == before + 3


def test_the_memory_moves_twenty_times_in_an_answer_and_no_token_does(lm, talk):
    plain = moelab.Conversation(lm, 120)
    "".join(plain.say(TEXT))
    talk = views.chat(lm, 120)
    answer = talk.say(TEXT)
    seen = set()
    for i in range(20):
        passes = len(lm.moelab.forwards)
        until(lambda: len(lm.moelab.forwards) > passes or answer.done())
        assert not answer.done()
        talk.page._handle_custom_msg(f"/memory {(i * 37) % 80 + 10}%", [])
        seen.add(talk.page.shown["memory"])
    answer.result()
    assert talk.talk.ids == plain.ids and len(seen) > 5


def test_what_ifs_are_simulated_beside_what_was_measured():
    with moelab.open_model(memory="50%", prefetch="router") as lm:
        talk = views.chat(lm, 40)
        talk.say("/replay memory=10%")
        assert not told(talk)  # nothing was said yet
        talk.say(TEXT).result()
        talk.say("/replay")
        (measured, real), (simulated, same) = told(talk)
        assert (measured, simulated) == ("measured", "simulated") and real == same
        talk.say("/replay memory=10% cache=lru")
        assert told(talk)[1][1] < real
        for change in ("prefetch=none", "prefetch=previous", "prefetch=perfect", "device=m2-max"):
            talk.say(f"/replay {change}")
            assert [kind for kind, _ in told(talk)] == ["measured", "simulated"]
        talk.say("/memory 25%")
        talk.say("/replay")  # of a run that was resized: in the memory that it has now
        assert told(talk)[1][1] < real


def test_what_goes_wrong_is_told(talk):
    for line, said in (
        ("/replay prefetch=ruoter", "There are: none, previous, perfect"),
        ("/replay memory=fast", "budget is 'fast'"),
        ("/memory 1kB", "least that works"),
        ("/memry", "mean 'memory'"),
    ):
        talk.page._handle_custom_msg(line, [])
        assert said in talk.log[-1][1]
    talk.say("the " * 5000).result()
    assert "the model takes up to" in talk.log[-1][1] and talk.page.shown["log"] == [
        *map(tuple, talk.log)
    ]


def test_a_model_in_memory_says_that_it_cannot_be_moved():
    with moelab.open_model() as lm:
        talk = views.chat(lm, 3)
        talk.say(TEXT).result()
        assert not talk.page.shown["whole"] and talk.page.shown["experts"][1]
        talk.say("/memory 50%")
        assert "open the model again, with memory=" in talk.log[-1][1]
        talk.say("/replay memory=50%")
        assert "no setting 'memory'" in talk.log[-1][1]


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with moelab.open_model(tiny.save("qwen3_moe", tmp_path / "model")) as lm:
        with pytest.raises(ValueError, match="tokenizer"):
            views.chat(lm)


def test_headless_nothing_is_shown(talk, monkeypatch):
    shown = []
    monkeypatch.setattr("moelab.viz.views.dialog.display", shown.append)
    talk._ipython_display_()
    assert shown.pop() is talk.page
    monkeypatch.setenv("MOELAB_HEADLESS", "1")
    talk._ipython_display_()
    assert not shown
