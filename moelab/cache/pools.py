"""The pools F ≺ C ≺ S ≺ E (ZipMoE §3.4): how many experts each holds, and how one of them makes
room.

F holds full tensors, C both compressed chunks, S sign-mantissa chunks, E exponent chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass, field

from moelab.base.specs import ExpertKey, State
from moelab.cache.policies import CachePolicy

#: the hierarchy F ≺ C ≺ S ≺ E of §3.4, best first
HIERARCHY = (State.FULL, State.COMPRESSED, State.SM, State.E)


@dataclass(frozen=True)
class Pools:
    """How many experts each pool holds: of the whole model, or of each layer (the scope of a
    `Residency`)."""

    F: int = 0
    C: int = 0
    S: int = 0
    E: int = 0

    def __post_init__(self) -> None:
        for name in "FCSE":
            if getattr(self, name) < 0:
                raise ValueError(
                    f"pool {name} holds {getattr(self, name)} experts; it must be 0 or more"
                )

    def __getitem__(self, state: State) -> int:
        return getattr(self, state.value)

    @property
    def capacity(self) -> int:
        return self.F + self.C + self.S + self.E

    def nbytes(self, full: int, sm: int, e: int) -> int:
        """Bytes of the pools, given those of one expert's full tensors, SM-chunks and E-chunks."""
        return self.F * full + self.C * (sm + e) + self.S * sm + self.E * e


@dataclass
class Pool:
    """One pool: its keys in order of arrival, how many it holds, and who decides about them."""

    size: int
    policy: CachePolicy
    keys: dict[ExpertKey, None] = field(default_factory=dict)

    def make_room(
        self, key: ExpertKey, found: Set[ExpertKey], used: Set[ExpertKey]
    ) -> ExpertKey | None:
        """The key that left so that `key` can enter, None if there was room, or `key` itself if it
        may not enter.

        used, found : the experts of the step, and those of them that were in memory before; a
            selective policy may choose among the newcomers too."""
        if len(self.keys) < self.size:
            return None
        pinned = used
        if self.selective:
            self.keys[key], pinned = None, found - {key}
        candidates = Candidates(self.keys, pinned)
        victim = self.victim(candidates) if candidates else key
        if victim == key:
            self.keys.pop(key, None)
            return key
        self.leave(victim)
        return victim

    def shrink(self, found: Set[ExpertKey], came: Set[ExpertKey]) -> list[ExpertKey]:
        """Let keys leave until no more than `size` are left. Those that were used, and `found` or
        `came`, stay unless nothing else is left; a selective policy may choose who came."""
        pinned = found if self.selective else found | came
        others = len(self.keys) - len(pinned)
        evicted = []
        for _ in range(len(self.keys) - self.size):
            pinned = pinned if others else frozenset()
            evicted.append(self.victim(Candidates(self.keys, pinned)))
            self.leave(evicted[-1])
            others -= 1
        return evicted

    def victim(self, candidates: Candidates) -> ExpertKey:
        """Whom the policy chooses among candidates; ValueError if it is none of them."""
        victim = self.policy.victim(candidates)
        if victim not in candidates:
            raise ValueError(
                f"the policy {type(self.policy).__name__} chose {victim!r} as victim, which is not among "
                "the candidates; victim(resident) must return one of resident"
            )
        return victim

    @property
    def selective(self) -> bool:
        return getattr(self.policy, "selective", False)

    def leave(self, key: ExpertKey, forget: bool = True) -> None:
        """Take a key out; `forget`: its policy is told, as no other pool of it has the key."""
        del self.keys[key]
        if forget:
            self.forget(key)

    def forget(self, key: ExpertKey) -> None:
        if hasattr(self.policy, "forget"):
            self.policy.forget(key)


@dataclass(eq=False)
class Candidates(Collection):
    """The keys of a pool that may leave: those that are not pinned, without a copy, as a pool may
    hold thousands."""

    keys: dict[ExpertKey, None]
    pinned: Set[ExpertKey]

    def __contains__(self, key: object) -> bool:
        return key in self.keys and key not in self.pinned

    def __iter__(self) -> Iterator[ExpertKey]:
        return (key for key in self.keys if key not in self.pinned)

    def __len__(self) -> int:
        return len(self.keys) - sum(key in self.keys for key in self.pinned)
