"""What was hot: how many tokens went to each expert in earlier sessions, so that the next one opens
with what it will probably need.

It is a file of the cache, by the store's identity, or of a checkpoint by its files, as looking at its
weights takes longer than opening it. Counts of all sessions tell about as much as recent ones, more
than who was in memory at the end of the last one (`moelab bench warm`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain

import torch
import xxhash
from torch import Tensor

from moelab.base.files import cache_folder, load_tensors, save_tensors
from moelab.base.schema import checked
from moelab.base.specs import ExpertKey, MoESpec
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.offloading.run import EngineRun

FORMAT = "moelab heat 1"
#: decoded tokens from which on a session says something; tokens after which a count is worth half
LEAST = 64
HALF_LIFE = 4096


class Heat:
    """Of the experts of a checkpoint: counts, float32 [L, E], all 0 where nothing is known."""

    def __init__(self, checkpoint: Checkpoint, spec: MoESpec) -> None:
        of_files = xxhash.xxh3_64_hexdigest(repr(checkpoint.stamps).encode())
        self.model = checkpoint.store.identity if checkpoint.store else of_files
        self.path = cache_folder("heat") / f"{self.model}.safetensors"
        self.counts = torch.zeros(spec.L, spec.E, dtype=torch.float32)

        def read(tensors: dict[str, Tensor], model: str) -> Tensor:
            if model != self.model:
                raise ValueError(f"it is of {model}, not of {self.model}")
            return checked(tensors, "counts", ("float32",), self.counts.shape, 0)

        about = "counts of hot experts", "decoding with this model", {"model": str}
        with suppress(FileNotFoundError):
            try:
                self.counts = load_tensors(self.path, FORMAT, *about, read)
            except ValueError as error:
                warnings.warn(f"{error}. The model opens with nothing in memory", stacklevel=2)

    def hottest(self) -> list[ExpertKey]:
        """The experts that were chosen, most often first."""
        order = self.counts.flatten().argsort(descending=True, stable=True)
        chosen = order[: self.counts.count_nonzero()].tolist()
        return [ExpertKey(*divmod(at, self.counts.shape[1])) for at in chosen]

    @contextmanager
    def learning(self, run: EngineRun) -> Iterator[None]:
        """At the end of the block, what a session has done is counted, if it has decoded enough."""
        yield
        if sum(one.kept for one in run.forwards if one.phase == "decode") < LEAST:
            return
        self.counts *= 0.5 ** (sum(one.kept for one in run.forwards) / HALF_LIFE)
        for layer, tokens in chain(*run.steps):
            for expert, n in tokens.items():
                self.counts[layer, expert] += n
        with suppress(OSError):  # a full disk: the next session opens with nothing
            save_tensors(self.path, FORMAT, {"counts": self.counts}, model=self.model)
