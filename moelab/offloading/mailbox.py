"""A mailbox in memory that a GPU and the CPU share: experts of a single token that the GPU does not
have are computed by the CPU where they lie, while the GPU computes the others.

The memory is pinned and mapped, so both sides read and write it by the same addresses; without a GPU
it is ordinary memory, and the protocol is the same. There is room for one message, as of a token's
layers one is computed at a time:

    GPU, stream order                            CPU, one thread (`moelab.kernels.serve`)
    post   x, away, w, then posted := ticket     wait for posted ≠ the ticket answered last
           (its own experts meanwhile)           y := Σ w · expert(x), then done := ticket
    take   wait for done = ticket, out += y

ticket = number · L + layer, where tokens are numbered from 1. A layer whose experts the GPU computes
alone posts nothing and waits for nothing, so it costs the link nothing.

Why it holds:
- *Each word has one writer.* posted, x, away, w and late are the GPU's, done and y are the thread's,
  stop and over the driver's; no two of them share a cache line. So nothing is read, changed and
  written back: a GPU's atomics are not atomic to the CPU over PCIe, its aligned loads and stores are
  (CUDA C++ Programming Guide, "Mapped Memory").
- *No value is torn, none is stale.* A word is 8 bytes, aligned, stored at once. It is stored with
  release behind what it stands for, and loaded with acquire before that is read (system scope on the
  GPU). x, away and w are written again only by the next post, which the stream puts behind this
  one's take, so behind done = ticket, and that behind all that the thread has read. y is written
  again only after the next post, so after its take.
- *No wake-up is lost.* Nobody waits for an event, but for a state that stays until it has been
  answered: posted = ticket until the next post, done = ticket until the next answer. Tickets only
  grow, and nothing is reset, so an answer is never one of an earlier token.
- *Nobody waits for ever.* The thread leaves when the driver sets over to the number of a token that
  the GPU has ended, or stop. The GPU leaves when stop is set, or after `patience` looks at done: it
  then writes its ticket to late, and does not wait again. After either a mailbox is not used again,
  and what the GPU has computed since is worth nothing: `check` says so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moelab.offloading.link import pin
from moelab.store.reader import aligned_buffer

LINE = 128  # bytes: some processors fetch two cache lines together
#: of the addresses; the GPU's, the thread's, the driver's
FIELDS = "posted", "x", "away", "w", "late", "done", "y", "stop", "over"
#: looks at `done`, of a microsecond or so over PCIe, after which the CPU is taken for dead: sooner
#: than the watchdog of a GPU that has a display ends the program
PATIENCE = 2_000_000


@dataclass(eq=False)
class Mailbox:
    """That of a model's L layers of K experts a token, hidden size H, for hidden states of `dtype`.

    at : name → address, of x [H], away int64 [K] (ids to compute here, −1 for others), w fp32 [K],
        y fp32 [H] and the other `FIELDS`, int64.
    patience : how often the GPU looks for an answer.
    """

    L: int
    K: int
    H: int
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(FIELDS, 8) | {
            "x": self.H * self.dtype.itemsize,
            "away": 8 * self.K,
            "w": 4 * self.K,
            "y": 4 * self.H,
        }
        ends = np.cumsum([-(-size // LINE) * LINE for size in sizes.values()]).tolist()
        self._memory = aligned_buffer(ends[-1])
        self._memory[:] = 0
        device = torch.device(self.device)
        if pin(self._memory, device, self) is None and device.type == "cuda":
            raise MemoryError("no memory can be shared with the GPU: leave out hybrid=")
        self._begins = dict(zip(FIELDS, [0, *ends]))
        self.at = {name: self._memory.ctypes.data + at for name, at in self._begins.items()}

    def view(self, name: str, dtype: torch.dtype = torch.int64, n: int = 1) -> Tensor:
        """A field of n numbers of a type."""
        begin = self._begins[name]
        return torch.from_numpy(self._memory[begin : begin + n * dtype.itemsize]).view(dtype)

    def end(self, number: int) -> None:
        """The GPU has ended this token: nothing more of it will be posted. Raises RuntimeError if it
        has gone on without an answer."""
        self.view("over")[0] = number
        if ticket := int(self.view("late")):
            raise RuntimeError(
                f"the CPU did not compute its experts of layer {ticket % self.L} of token "
                f"{ticket // self.L} in time, and the GPU went on without them"
            )

    def stop(self) -> None:
        """End all waiting, for good."""
        self.view("stop")[0] = 1

    def stopped(self) -> Mailbox:
        """One of as many layers and experts, of ordinary memory, that was stopped."""
        other = Mailbox(self.L, self.K, self.H, self.dtype)
        other.stop()
        return other

    def check(self) -> None:
        """Raise RuntimeError if waiting was ended."""
        if int(self.view("stop")):
            raise RuntimeError("computing experts on the CPU was stopped within a token")
