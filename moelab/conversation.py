"""A conversation: turns of which each is processed once.

The model's chat template renders all of it for each turn. The KV cache of what was processed before
stays, is cut back to where the text differs (templates leave out the thinking of earlier answers,
say), and only what follows is processed. Layers with a sliding window, and convolutions, keep all
that a turn adds until the next one has cut it. Recurrent states cannot be cut, so there a text that
differs is processed from its start.

Text comes from a thread, which ends between two tokens when its reader is interrupted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import takewhile
from queue import Empty
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from moelab.models import compat
from moelab.models.greedy import greedy
from moelab.offloading.engine import Cancelled
from moelab.trace import DECODE, PREFILL

#: seconds after which a reader looks whether it was interrupted: Windows wakes none
POLL = 0.1


class Conversation:
    """Turns with a model that `moelab.open_model` has opened, decoded greedily. Without a chat
    template they are one text that goes on.

    messages : {"role", "content"} of all turns; a template's may be edited between them.
    ids : tokens so far.    phases : in which each of them was processed, as of a `RoutingTrace`.
    lm : may be replaced between turns, by the same weights opened otherwise.

    Raises ValueError: a model without a tokenizer, or with an encoder."""

    def __init__(self, lm: Any, max_new_tokens: int = 1024) -> None:
        if lm.tokenizer is None or lm.config.is_encoder_decoder:
            raise ValueError("a conversation needs a model with a tokenizer and without an encoder")
        self.lm, self.max_new_tokens = lm, max_new_tokens
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []
        self.phases: list[int] = []
        self._told: set[str] = set()
        self._forget()
        if self._cache is None:
            self._tell("this model makes its own cache, so each turn is processed from the start")
        if lm.tokenizer.chat_template is None:
            self._tell("this model has no chat template, so turns are one text that goes on")

    def say(self, text: str) -> Iterator[str]:
        """The answer, in pieces as words become whole. What was said stays, whoever ends it; an
        error leaves the conversation as it was before the turn.

        Raises ValueError: no text, what the template refuses, a conversation that is longer than the
        model takes; and what `generate` raises."""
        ids = self._rendered(text)
        most = getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)
        room = min(self.max_new_tokens, (most or len(ids) + self.max_new_tokens) - len(ids))
        if room < 1:
            raise ValueError(
                f"this makes {len(ids):,} tokens, and the model takes {most:,}: begin anew"
            )
        answer = _Answer(self.lm.tokenizer)
        worker = Thread(target=self._generate, args=(text, ids, room, answer))
        worker.start()
        try:
            while (piece := answer.piece()) is not None:
                if piece:
                    yield piece
        finally:
            answer.stop.set()
            if worker.is_alive() and len(answer.ids) <= len(ids):  # it processes the turn
                self.lm.moelab.cancel()
            worker.join()
        if answer.error is not None:
            raise answer.error

    def _generate(self, text: str, ids: list[int], room: int, answer: _Answer) -> None:
        """Generate, and keep what came of it."""
        lm, given = self.lm, torch.tensor([ids], device=self.lm.device)
        try:
            kept = self._keep(ids)
            with torch.inference_mode():
                lm.generate(
                    input_ids=given,
                    attention_mask=torch.ones_like(given),
                    past_key_values=self._cache,
                    max_new_tokens=room,
                    stopping_criteria=[answer.stopped],
                    streamer=answer,
                    **greedy(lm),
                )
            self._held = len(answer.ids) - 1  # the last is not processed yet
        except BaseException as error:  # which the reader raises
            self._forget()
            if not isinstance(error, Cancelled):
                answer.error = error
                answer.end()
                return
        said = answer.ids[len(ids) :]
        self.phases = self.phases[:kept] + [PREFILL] * (len(ids) - kept) + [DECODE] * len(said)
        self.ids = ids + said
        content = lm.tokenizer.decode(said, skip_special_tokens=True)
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": content},
        ]
        answer.end()

    def _rendered(self, text: str) -> list[int]:
        """Ids of the conversation with one turn more."""
        tokenizer = self.lm.tokenizer
        if not text.strip():
            raise ValueError("there is nothing to answer")
        if tokenizer.chat_template is None:
            ended = self.ids[-1:] == [tokenizer.eos_token_id]
            before = self.ids[: len(self.ids) - ended]
            more = tokenizer("\n" * bool(before) + text, add_special_tokens=not before)
            return before + more["input_ids"]
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the model's chat template refuses this: {error}") from error

    def _keep(self, ids: list[int]) -> int:
        """Cut the cache to what these ids begin with, or make a new one; how many tokens it holds."""
        pairs = zip(self.ids[: self._held], ids[:-1])  # at least one is to be processed
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same and self._cut(same):
            return same
        if same:
            self._tell(
                "what was said before is rendered otherwise now, and this model's cache cannot be cut "
                "to what is the same, so the conversation is processed from its start"
            )
        self._forget()
        return 0

    def _cut(self, tokens: int) -> bool:
        """Have the cache hold so many of its tokens, if it can."""
        cache, more = self._cache, self._held - tokens
        if compat.is_stateful(self.lm):
            return not more
        forgets = any(map(cache.is_recording_past, range(len(cache.layers))))
        if more and not (cache.is_croppable and (tokens >= self._since or not forgets)):
            return False
        cache.crop(-more)
        self._held = self._since = tokens
        return True

    def _forget(self) -> None:
        """Begin with an empty cache; what layers forget, they have kept since so many tokens."""
        self._cache = compat.empty_cache(self.lm)
        self._held = self._since = 0

    def _tell(self, what: str) -> None:
        """A warning, once."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(what, stacklevel=3)


class _Answer:
    """What a generation tells from its thread, to whom reads: a streamer of transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import TextIteratorStreamer

        how = {"skip_prompt": True, "skip_special_tokens": True}
        self._text = TextIteratorStreamer(tokenizer, timeout=POLL, **how)
        self.ids: list[int] = []
        self.stop = Event()
        self.error: BaseException | None = None

    def put(self, ids: Tensor) -> None:
        self.ids += ids.flatten().tolist()
        self._text.put(ids)

    def end(self) -> None:
        self._text.end()

    def piece(self) -> str | None:
        """What comes next; "" if nothing has come for a while, None at the end."""
        try:
            return next(self._text, None)
        except Empty:
            return ""

    def stopped(self, ids: Tensor, _: Any) -> Tensor:
        """Asked after each token, of ids [B, S] → [B]."""
        return torch.full((len(ids),), self.stop.is_set(), device=ids.device)
