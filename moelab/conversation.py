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
from concurrent.futures import ThreadPoolExecutor
from os.path import commonprefix
from threading import Event
from typing import Any

import torch
from torch import Tensor

from moelab.models import compat
from moelab.models.greedy import greedy
from moelab.trace import DECODE, PREFILL


class Conversation:
    """Turns with a model that `moelab.open_model` has opened, decoded greedily. Without a chat
    template they are one text that goes on.

    messages : {"role", "content"} of all turns; with a template they may be edited between them.
    ids : tokens so far.    phases : in which each of them was processed, as of a `RoutingTrace`.
    lm : may be replaced between turns, by the same weights opened otherwise.

    Raises ValueError: a model without a tokenizer, or with an encoder."""

    def __init__(self, lm: Any, max_new_tokens: int = 1024) -> None:
        if lm.tokenizer is None or lm.config.is_encoder_decoder:
            raise ValueError("a conversation needs a model with a tokenizer and without an encoder")
        if lm.tokenizer.chat_template is None:
            warnings.warn("no chat template, so turns are one text that goes on", stacklevel=2)
        self.lm, self.max_new_tokens = lm, max_new_tokens
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []
        self.phases: list[int] = []
        self._stop, self._begun = Event(), -1
        self._forget()

    def say(self, text: str) -> Iterator[str]:
        """The answer, in pieces as words become whole, some of them "". What was said stays when it is
        closed; before the first token, and after an error, the conversation is as before the turn.

        Raises ValueError: no text, or more than the model takes; what the template and `generate`
        raise."""
        from transformers import TextIteratorStreamer

        try:
            ids, self._begun = self._rendered(text), len(self.lm.moelab.forwards)
            if self._stop.is_set():
                return
            how = {"skip_prompt": True, "skip_special_tokens": True}
            stream = TextIteratorStreamer(self.lm.tokenizer, **how)
            with ThreadPoolExecutor(1) as thread:
                done = thread.submit(self._generate, text, ids, stream)
                done.add_done_callback(lambda _: stream.end())
                try:
                    yield from stream
                finally:
                    self.stop()
            done.result()
        finally:
            self._stop.clear()

    def stop(self) -> None:
        """End the answer that another thread reads: after its token; before the first one, with
        `Cancelled`. If none is read yet, the next one is nothing."""
        self._stop.set()
        if len(self.lm.moelab.forwards) == self._begun:  # the turn is still processed
            self.lm.moelab.cancel()

    def _generate(self, text: str, ids: list[int], stream: Any) -> None:
        """Generate until it is stopped, and keep what came of it."""
        kept, given = self._keep(ids), torch.tensor([ids], device=self.lm.device)

        def stopped(ids: Tensor, _: Any) -> Tensor:
            return torch.full((len(ids),), self._stop.is_set(), device=ids.device)

        try:
            with torch.inference_mode():
                out = self.lm.generate(
                    input_ids=given,
                    attention_mask=torch.ones_like(given),
                    past_key_values=self._cache,
                    max_new_tokens=self.max_new_tokens,
                    stopping_criteria=[stopped],
                    streamer=stream,
                    **greedy(self.lm),
                )
        except BaseException:  # between two layers
            self._forget()
            raise
        self.ids = out[0].tolist()
        self._held = len(self.ids) - 1  # the last is not processed yet
        new = self.ids[len(ids) :]
        self.phases[kept:] = [PREFILL] * (len(ids) - kept) + [DECODE] * len(new)
        said = self.lm.tokenizer.decode(new, skip_special_tokens=True)
        for role, content in (("user", text), ("assistant", said)):
            self.messages.append({"role": role, "content": content})

    def _rendered(self, text: str) -> list[int]:
        """Ids of the conversation with one turn more."""
        tokenizer, config = self.lm.tokenizer, self.lm.config.get_text_config()
        if tokenizer.chat_template is None:
            ended = self.ids[-1:] == [tokenizer.eos_token_id]
            ids = self.ids[: len(self.ids) - ended]
            ids += tokenizer("\n" * bool(ids) + text, add_special_tokens=not ids)["input_ids"]
        else:
            turn = {"role": "user", "content": text}
            ids = tokenizer.apply_chat_template(
                [*self.messages, turn], add_generation_prompt=True, return_dict=False
            )
        most = getattr(config, "max_position_embeddings", len(ids))
        if not 0 < len(ids) <= most:
            raise ValueError(f"this makes {len(ids):,} tokens; the model takes up to {most:,}")
        return ids

    def _keep(self, ids: list[int]) -> int:
        """Have the cache hold a beginning of these ids, and of how many."""
        # of any sequences; at least one token is to be processed
        same = len(commonprefix([self.ids[: self._held], ids[:-1]]))
        if same and self._cut(same):
            return same
        if same:
            warnings.warn(
                "this model's cache cannot be cut to what this turn shares with what was processed, so "
                "the conversation is processed from its start",
                stacklevel=2,
            )
        self._forget()
        return 0

    def _cut(self, tokens: int) -> bool:
        """Have the cache hold so many of its tokens, if it can."""
        cache, more = self._cache, self._held - tokens
        if cache is None or compat.is_stateful(self.lm):
            return cache is not None and not more
        if more and not (cache.is_croppable and tokens >= self._since):
            return False
        cache.crop(-more)
        self._held = self._since = tokens
        return True

    def _forget(self) -> None:
        """Begin with an empty cache; what a layer may forget, it keeps since so many tokens."""
        self._cache = compat.empty_cache(self.lm)
        self._held = self._since = 0
