"""RoutingTrace: which experts every token visited, as `moelab.record` records it, saved without
pickle.

On disk: one safetensors file, spec and identity in its metadata. The hidden states of a trace,
which can be a thousand times larger, lie in two further safetensors files beside it: they are
written as they come and read by mapping them into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from moelab.base.files import absolute, atomic, load_tensors, save_tensors
from moelab.base.schema import FLOATS, checked
from moelab.base.specs import MoESpec
from moelab.store.headers import NAMES, header_bytes

PREFILL = 0
DECODE = 1
FORMAT = "moelab.trace/1"
HIDDEN = ("router_inputs", "residuals")
FIELDS = ("ids", "weights", "phase", "sequence", "position", "tokens")


@dataclass
class RoutingTrace:
    """Recorded routing of T tokens through L MoE layers.

    ids : int16 [T, L, K], the experts that were executed; E where none ran (a dropped token, or a
        layer that the token does not pass: encoder tokens skip the decoder's layers).
    weights : [T, L, K], the executed weights in the router's dtype; 0 where no expert ran.
    phase : uint8 [T], `PREFILL` or `DECODE`.
    sequence : int32 [T], which prompt the token belongs to. Tokens stand in the order of execution.
    position : int32 [T], index within its sequence, padding not counted.
    tokens : int32 [T], vocabulary ids.
    model_id : the model's identity (`moelab.models.identity`).
    router_inputs, residuals : [T, L, H] or None: what each router saw, and the residual stream
    before the norm."""

    ids: torch.Tensor
    weights: torch.Tensor
    phase: torch.Tensor
    sequence: torch.Tensor
    position: torch.Tensor
    tokens: torch.Tensor
    spec: MoESpec
    model_id: str
    router_inputs: torch.Tensor | None = None
    residuals: torch.Tensor | None = None

    def __post_init__(self) -> None:
        T = len(self.ids)
        L = self.spec.L
        K = self.spec.K
        for name in FIELDS:
            wanted = [T, L, K] if name in ("ids", "weights") else [T]
            if (found := list(getattr(self, name).shape)) != wanted:
                raise ValueError(
                    f"{name} of a trace of {self.spec.name} is {found}; it must be {wanted}"
                )

    @classmethod
    def of_ids(
        cls, ids: torch.Tensor, spec: MoESpec, model_id: str = "", **columns: torch.Tensor | None
    ) -> RoutingTrace:
        """A trace of ids [T, L, K] and the columns that are known. What is not: weights 1/K,
        phase decode, one sequence, positions in order, tokens 0."""
        T = len(ids)
        ran = ids < spec.E
        known = {name: column for name, column in columns.items() if column is not None}
        sequence = known.setdefault("sequence", torch.zeros(T, dtype=torch.int32))
        if "position" not in known:
            _, which, counts = sequence.unique(return_inverse=True, return_counts=True)
            by = which.argsort(stable=True)
            known["position"] = torch.empty(T, dtype=torch.int32)
            starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
            known["position"][by] = (torch.arange(T) - starts).int()
        known.setdefault("weights", ran / spec.K)
        known.setdefault("phase", torch.full((T,), DECODE, dtype=torch.uint8))
        known.setdefault("tokens", torch.zeros(T, dtype=torch.int32))
        return cls(ids=ids.to(torch.int16), spec=spec, model_id=model_id, **known)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sequences(self) -> int:
        return int(self.sequence.max()) + 1 if len(self) else 0

    def select(self, mask: torch.Tensor) -> RoutingTrace:
        """The tokens where `mask` (bool [T]) holds, as a trace; hidden states go along."""
        columns = {name: getattr(self, name) for name in (*FIELDS, *HIDDEN)}
        return replace(self, **{name: of[mask] for name, of in columns.items() if of is not None})

    def in_phase(self, phase: int, least: int = 1) -> RoutingTrace:
        """This trace or, if it has fewer tokens than that in a phase, all of its tokens as if they
        were in it: a text is routed alike whether it is read or written."""
        if int((self.phase == phase).sum()) >= least:
            return self
        return replace(self, phase=torch.full_like(self.phase, phase))

    def counts(self) -> torch.Tensor:
        """Tokens that each expert executed: int64 [L, E]."""
        return counted(self.ids, self.spec.E)[0]

    def save(self, path: str | Path, hidden: bool = True) -> Path:
        """Write the trace atomically to `path` (a .safetensors file); returns the path.

        Hidden states go to `<stem>.router_inputs.safetensors` and `<stem>.residuals.safetensors`
        beside it; with `hidden=False` they are there already (`moelab.record`)."""
        path = absolute(path)
        names = [name for name in HIDDEN if getattr(self, name) is not None]
        for name in names if hidden else ():
            with growing_tensor(hidden_path(path, name), name) as append:
                for rows in getattr(self, name).split(4096):
                    append(rows)
        columns = {name: getattr(self, name) for name in FIELDS}
        about = {"spec": asdict(self.spec), "model_id": self.model_id, "hidden": names}
        return save_tensors(path, FORMAT, columns, **about)

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Read a trace, hidden states mapped. Raises FileNotFoundError, ValueError: not a whole and
        readable trace."""
        from safetensors import SafetensorError

        path = absolute(path)

        def build(
            tensors: dict[str, torch.Tensor], spec: MoESpec, model_id: str, hidden: list[str]
        ) -> RoutingTrace:
            ids = checked(tensors, "ids", ("int16",), (None, spec.L, spec.K), 0, spec.E)
            T = len(ids)
            columns = {
                "ids": ids,
                "weights": checked(tensors, "weights", FLOATS, ids.shape),
                "phase": checked(tensors, "phase", ("uint8",), (T,), PREFILL, DECODE),
            }
            for name in ("sequence", "position", "tokens"):
                columns[name] = checked(tensors, name, ("int32",), (T,), 0)
            for name in hidden:
                try:
                    found = {name: map_hidden(path, name)}
                    columns[name] = checked(found, name, FLOATS, (T, spec.L, None), None)
                except (SafetensorError, FileNotFoundError, ValueError) as error:
                    raise ValueError(
                        f"it comes with {hidden_path(path, name).name}, which is missing or damaged: "
                        f"keep the files of a trace together ({error})"
                    ) from error
            return cls(**columns, spec=spec, model_id=model_id)

        about = {"spec": MoESpec, "model_id": str, "hidden": list[Literal[*HIDDEN]]}
        made = "moelab.record(…).save(path)"
        return load_tensors(path, FORMAT, "routing trace", made, about, build)

    def __repr__(self) -> str:
        spec = self.spec
        prefill = int((self.phase == PREFILL).sum())
        return (
            f"RoutingTrace({spec.name}: {len(self):,} tokens of {self.sequences} prompts, "
            f"{prefill:,} in prefill; {spec.L} MoE layers of {spec.E} experts, top-{spec.K})"
        )


def counted(
    ids: torch.Tensor, E: int, bins: torch.Tensor | None = None, n: int = 1
) -> torch.Tensor:
    """Tokens of each expert by bin: int64 [n, L, E], of ids [T, L, K] whose tokens are in `bins` [T],
    0 … n − 1 (None: all in one). The id E, "no expert ran", is counted nowhere."""
    bins = torch.zeros(len(ids), dtype=torch.long) if bins is None else bins.long()
    base = bins[:, None] * (E + 1)
    layers = [
        torch.bincount((base + layer).reshape(-1), minlength=n * (E + 1)).view(n, E + 1)
        for layer in ids.unbind(1)
    ]
    return torch.stack(layers, 1)[..., :E]


def hidden_path(trace_path: Path, name: str) -> Path:
    return trace_path.with_name(
        f"{trace_path.name.removesuffix('.safetensors')}.{name}.safetensors"
    )


def map_hidden(trace_path: Path, name: str) -> torch.Tensor:
    """The hidden states [T, L, H] beside a trace; their file may be removed meanwhile."""
    from safetensors import safe_open

    with safe_open(hidden_path(trace_path, name), "pt") as file:
        return file.get_tensor(name)


ROOM = 512  # bytes of a growing tensor's header; safetensors allows trailing blanks in it


@contextmanager
def growing_tensor(path: Path, name: str) -> Iterator[Callable[[torch.Tensor], None]]:
    """Write a safetensors file of one tensor whose first dimension is not known until the end.

    Yields `append(rows [n, …])`, to be called with the same trailing shape and dtype. The file
    appears when the block ends, and not if it ends with an error."""
    with atomic(path) as part, open(part, "wb") as file:
        file.write(b" " * ROOM)
        total = 0
        last = torch.empty(0, dtype=torch.float32)

        def append(rows: torch.Tensor) -> None:
            nonlocal total, last
            last = rows.detach().contiguous().cpu()
            total += len(last)
            if last.numel():
                file.write(last.view(torch.uint8).numpy().data)

        yield append
        file.seek(0)
        shape = total, *last.shape[1:]
        file.write(header_bytes({name: (NAMES[last.dtype], shape)}, least=ROOM))
