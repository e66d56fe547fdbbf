"""`moelab chat` as a person has it: on a pseudo-terminal, from a pipe, and its commands."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import moelab
from moelab import trace
from moelab.__main__ import main
from moelab.base.files import small_model
from moelab.conversation import Conversation
from moelab.trace import DECODE, PREFILL

ROOT = Path(__file__).parents[1]
CHAT = ["chat", "--memory", "40%", "--max-new-tokens"]
#: what is told below an answer
STATUS = re.compile(
    r"^\[[\d.]+ tokens/s, the first after [\d.]+ s(; \d+% of experts found in memory, [\d.]+ \w+ read "
    r"a token)?; ([\d.]+) [MG]B of memory\]$",
    re.M,
)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Types lines into a chat through a pipe, with options; what came on each stream."""

    def typed(*lines: str, options=(*CHAT, "8")) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main([*options]) == 0
        found = capsys.readouterr()
        assert "Traceback" not in found.err and "\033" not in found.out + found.err
        return found.out, found.err

    return typed


def test_a_pipe_gets_an_answer_a_line_and_nothing_else(chat):
    out, err = chat("the red fox 37", "", "the blue cat", "/quit", "never said")
    with moelab.open_model() as lm:
        talk = Conversation(lm, 8)
        wanted = ["".join(talk.say(turn)) for turn in ("the red fox 37", "the blue cat")]
    assert out == "".join(f"{text}\n" for text in wanted)
    assert len(STATUS.findall(err)) == 2 and "no chat template" in err
    assert all(found[0] for found in STATUS.findall(err))
    _, err = chat("the red fox", options=("chat", "--max-new-tokens", "2"))
    assert not STATUS.search(err)[1]  # all experts are in memory


@pytest.mark.parametrize(
    "line, said",
    [
        ("/memry 4GB", "mean 'memory'"),
        ("/memory 1kB", "least that works"),
        ("/memory", "the budget is ''"),
        ("/cache lur", "mean 'lru'"),
        ("/cache belady", "steps"),
        ("/prefetch ruoter", "mean 'router'"),
        ("/replay memry=1GB", "mean 'memory'"),
        ("/replay device=rtx-309", "rtx-3090"),
        ("/replay memory=fast", "budget is 'fast'"),
        ("/save", "regular file"),
        ("/", "/quit"),
        ("/help", "/memory SIZE"),
    ],
)
def test_a_command_that_cannot_be_is_told_and_the_chat_goes_on(line, said, chat):
    out, err = chat("the red fox", line, "the blue", options=(*CHAT, "2"))
    assert said in err and out.count("\n") >= 2 and len(STATUS.findall(err)) == 2


def test_commands_change_what_runs_and_no_token(chat):
    turns = ["the red fox 37\nthe red".replace("\n", " "), "the blue cat", "where is", "the old"]
    plain, _ = chat(*turns)
    commands = ["/memory 80%", "/cache lru", "/prefetch off"]
    out, err = chat(*(line for pair in zip(turns, [*commands, "/quit"]) for line in pair))
    assert out == plain and len(STATUS.findall(err)) == 4
    _, err = chat("the red fox 37", "/new", "the red fox 37")
    assert len(STATUS.findall(err)) == 2


def test_a_conversation_is_saved_and_replayed(chat, tmp_path):
    file = tmp_path / "talk.safetensors"
    _, err = chat(
        "the red fox 37", "the blue", "/replay", "/replay memory=10% cache=lru", f"/save {file}"
    )
    told = re.findall(r"^(measured|simulated): .* in all, .*hit rate (\d+)%", err, re.M)
    assert [kind for kind, _ in told] == ["measured", "simulated"] * 2
    (_, real), (_, same), _, (_, less) = told
    assert real == same > less  # two digits each
    found = trace.load(file)
    with moelab.open_model() as lm:
        talk = Conversation(lm, 8)
        for turn in ("the red fox 37", "the blue"):
            "".join(talk.say(turn))
        wanted = moelab.record(lm, [talk.ids])
    assert torch.equal(found.ids, wanted.ids) and found.tokens.tolist() == talk.ids
    assert found.phase.tolist() == talk.phases and {*talk.phases} == {PREFILL, DECODE}


def test_the_memory_moves_twenty_times_in_an_answer_and_no_token_does():
    with moelab.open_model(memory="50%", prefetch="router") as lm:
        wanted = Conversation(lm, 60)
        "".join(wanted.say("the red fox 37\nthe red"))
        talk, moved = Conversation(lm, 60), 0
        for _ in talk.say("the red fox 37\nthe red"):
            lm.moelab.resize(f"{(moved * 37) % 80 + 10}%")
            moved += 1
        assert moved >= 20 and talk.ids == wanted.ids


def test_a_download_is_told_before_it_begins(monkeypatch, chat, tmp_path):
    """At the border of the hub's client: first the config alone, then all files."""
    whole = Path(shutil.copytree(small_model(), tmp_path / "whole"))
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(whole / "config.json", part)
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        return str(whole if any("safetensors" in one for one in allow_patterns) else part)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    out, err = chat("the red fox", options=("chat", "someone/small", "--max-new-tokens", "3"))
    assert out.strip() and len(asked) > 1
    told = err[: err.index("opening")]
    assert re.search(r"^[\d.]+ MB to download to .*: [\d.]+ m?s at 100 Mbit/s$", told, re.M)
    assert "Gives:" in told and "a token" in told


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, *options: str, **environment: str) -> None:
        pty = pytest.importorskip("pty")
        self.master, slave = pty.openpty()
        run = [sys.executable, "-m", "moelab", *options]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = subprocess.Popen(
            run, cwd=ROOT, env=os.environ | environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
            **streams,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str, seconds: float = 120) -> float:
        """Read until this comes after what was read before; how long that took."""
        begin, at = time.monotonic(), len(self.seen)
        while not re.search(pattern, self.seen[at:]):
            left = seconds - (time.monotonic() - begin)
            assert left > 0 and select.select([self.master], [], [], left)[0], self.seen[-2000:]
            self.seen += os.read(self.master, 65536).decode(errors="replace")
        return time.monotonic() - begin

    def ends(self) -> str:
        assert self.process.wait(60) == 0, self.seen[-2000:]
        os.close(self.master)
        assert "Traceback" not in self.seen
        return self.seen


def test_ctrl_c_ends_an_answer_and_keeps_it():
    chat = Terminal(*CHAT, "800", TERM="dumb")
    chat.until("> $")
    for turn in ("the red fox 37", "the blue cat", "where is"):
        chat.type(f"{turn}\n")
        chat.until(r"\n.*\w+ \w+ \w+ ")  # the answer has begun
        chat.type("\x03")
        chat.until(r"stopped\r\n> $")  # which is not told of one that has ended
    assert len(re.findall("tokens/s", chat.seen)) == 3
    for _ in range(2):  # with no answer to end; what comes just before Python waits, waits too
        chat.type("\x03")
        with suppress(subprocess.TimeoutExpired):
            chat.process.wait(30)
            break
    assert "\033" not in chat.ends()


def test_many_turns_take_no_more_memory():
    lines = "the\n" * 60
    run = [sys.executable, "-m", "moelab", *CHAT, "2"]
    done = subprocess.run(
        run, cwd=ROOT, input=lines, capture_output=True, text=True, timeout=280, check=True
    )
    memory = [float(found[1]) for found in STATUS.findall(done.stderr)]
    assert len(memory) == 60 and memory[-1] < memory[19] + 10, json.dumps(memory)
