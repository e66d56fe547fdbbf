"""Turns of a conversation against transformers' own generation of the whole text with a fresh
cache."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
import warnings

import pytest
import torch

from moelab import open_model
from moelab.base.files import small_model
from moelab.conversation import Conversation
from moelab.models import discover
from moelab.recording import record
from moelab.trace import DECODE, PREFILL
from tests.models import tiny

#: architecture → its own sizes; full attention, sliding windows, states that convolve or recur
KINDS = {
    "qwen3_moe": {},
    "mixtral": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},
    "lfm2_moe": {},
    "qwen3_next": {},
    "granitemoehybrid": {},
}
STATEFUL = ("qwen3_next", "granitemoehybrid")
#: renders each turn whole
TEMPLATE = """{% for m in messages %}<{{ m.role }}>
{{ m.content }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
#: leaves out what earlier answers said, as others do with thinking
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else 'so' }}")
TURNS = ["the red fox is here", "what does the old house have", "and now"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    """A model of this architecture that takes the small model's tokens."""
    folder = tmp_path_factory.mktemp("conversation") / request.param
    sizes = {"vocab_size": 1024, "max_position_embeddings": 512, "eos_token_id": 0}
    tiny.save(request.param, folder, **sizes, **KINDS[request.param])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_model() / name, folder)
    return folder


def processed(lm):
    """Tokens of each forward pass from now on, as the model's own embedding sees them."""
    seen = []
    lm.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0].numel())
    )
    return seen


def anew(lm, ids, new):
    """What transformers generates from these ids, with a cache of its own."""
    given = torch.tensor([ids])
    return lm.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new)[0].tolist()


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL])
@pytest.mark.parametrize("memory", [None, "50%"])
def test_turns_are_processed_once_and_give_the_tokens_of_the_whole_text(folder, template, memory):
    stock = open_model(folder)
    with open_model(folder, memory=memory) as lm:
        lm.tokenizer.chat_template = template
        talk, seen, told, cuts = Conversation(lm, 9), processed(lm), [], 0
        for turn in TURNS:
            messages = [*talk.messages, {"role": "user", "content": turn}]
            ids = lm.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            held = talk.ids[:-1]
            same = next((i for i, (a, b) in enumerate(zip(held, ids)) if a != b), len(held))
            seen.clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                text = "".join(talk.say(turn))
            told += [str(of.message) for of in caught if "from its start" in str(of.message)]
            assert talk.ids == anew(stock, ids, 9)
            cut = folder.name in STATEFUL and same < len(held)
            cuts += cut
            assert seen[0] == len(ids) - (0 if cut else same) and set(seen[1:]) <= {1}
            assert [m["content"] for m in talk.messages[-2:]] == [turn, text]
        assert len(told) == cuts
        assert template is TEMPLATE or same < len(held)


@pytest.fixture
def small():
    """In float32: bf16 has ties, which positions of one pass and of many break otherwise."""
    with open_model(memory="50%", dtype="float32") as lm, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no template
        yield lm


def answered(talk, turn):
    """Without a template, a turn gives the tokens of the whole text, eight new ones; returns its
    own."""
    before = talk.ids
    "".join(talk.say(turn))
    own = talk.lm.tokenizer("\n" * bool(before) + turn).input_ids
    assert talk.ids == anew(talk.lm, before + own, 8)
    return own


def test_without_a_template_turns_are_one_text(small):
    talk = Conversation(small, 8)
    for turn in ("the red fox 37\nthe red", "the blue cat"):
        answered(talk, turn)
    with pytest.warns(UserWarning, match="no chat template"):
        Conversation(small)


def test_it_ends_within_a_token_and_goes_on_from_there(small):
    talk, rng, threads = Conversation(small, 40), random.Random(0), threading.active_count()
    for turn in ("the red fox", "the blue cat", "where is", "the old"):
        before, wanted = talk.ids, rng.randint(1, 12)
        pieces = talk.say(turn)
        said = "".join(next(pieces) for _ in range(wanted))
        pieces.close()
        text = talk.messages[-1]["content"]
        assert text.startswith(said) and threading.active_count() <= threads
        more = small.tokenizer("\n" * bool(before) + turn).input_ids
        assert talk.ids == anew(small, before + more, 40)[: len(talk.ids)]


def test_ctrl_c_before_the_first_token_takes_the_turn_back(small):
    talk, layers = Conversation(small, 8), []
    "".join(talk.say("the red fox"))
    before, messages = talk.ids, list(talk.messages)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(*_):
        layers.append(1)
        if len(layers) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)

    hooks = [layer.block.register_forward_pre_hook(interrupt) for layer in discover(small)]
    with pytest.raises(KeyboardInterrupt):
        "".join(talk.say("the blue cat"))
    signal.signal(signal.SIGINT, handler)
    for hook in hooks:
        hook.remove()
    assert len(layers) < len(hooks) and (talk.ids, talk.messages) == (before, messages)
    answered(talk, "the blue cat")


def test_an_error_leaves_it_as_it_was(small):
    talk = Conversation(small, 8)
    "".join(talk.say("the red fox"))
    before, messages = talk.ids, list(talk.messages)

    def broken(*_):
        raise MemoryError("no more")

    hook = small.register_forward_pre_hook(broken)
    with pytest.raises(MemoryError):
        "".join(talk.say("the blue cat"))
    hook.remove()
    assert (talk.ids, talk.messages) == (before, messages)
    with pytest.raises(ValueError, match="makes 0 tokens"):
        next(Conversation(small).say(""))
    with pytest.raises(ValueError, match="the model takes"):
        next(talk.say("the red fox " * 2000))
    small.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Exception, match="roles must alternate"):
        next(talk.say("the"))
    small.tokenizer.chat_template = None
    answered(talk, "the blue cat")


def test_another_opening_of_the_same_weights_goes_on(small):
    talk = Conversation(small, 8)
    "".join(talk.say("the red fox 37\nthe red"))
    with open_model(memory="30%", cache="lru", dtype="float32") as again:
        talk.lm, seen = again, processed(again)
        more = answered(talk, "the blue")
        assert seen[0] == len(more) + 1


def test_phases_are_those_in_which_tokens_were_processed(small):
    talk = Conversation(small, 8)
    "".join(talk.say("the red fox 37\nthe red"))
    n = len(talk.ids) - 8
    assert talk.phases == [PREFILL] * n + [DECODE] * 8
    "".join(talk.say("the blue"))
    assert talk.phases[: n + 8] == [PREFILL] * n + [DECODE] * 7 + [PREFILL]  # the last came later
    assert len(talk.phases) == len(talk.ids) == len(record(small, [talk.ids]))
