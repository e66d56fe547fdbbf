"""`record`: run prompts through a model and write down which experts every token visited.

Hooks at the seam see the *executed* ids and weights, whatever runs the experts. Padding and tokens
of finished sequences, whose results are not used, are left out: a batched trace equals the traces
of its prompts one by one."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moelab.checkpoint.opening import spec_of
from moelab.models import MoELayer
from moelab.models.greedy import greedy
from moelab.models.identity import identity
from moelab.models.stream import Stream, stacks, streams
from moelab.progress import progress
from moelab.specs import MoESpec
from moelab.trace import DECODE, FIELDS, HIDDEN, PREFILL, GrowingTensor, RoutingTrace, hidden_path


def record(
    model: Any,
    prompts: Sequence[Any],
    max_new_tokens: int = 0,
    hidden: bool | str | Path = False,
    *,
    batch_size: int = 8,
    tokenizer: Any = None,
    **generate_options: Any,
) -> RoutingTrace:
    """Run `prompts` and record the routing of prefill and decode; `sequence` counts prompts in the
    order given.

    model : any transformers MoE model, opened by moelab or not.
    prompts : texts, `moelab.datasets.Prompt`s or lists of token ids.
    max_new_tokens : tokens to generate greedily after each prompt; 0 records the prefill alone. The
        last token generated is never fed back, so n new tokens give n − 1 decode steps.
    hidden : also keep router inputs and residuals, [T, L, H] each, on disk: True in a temporary
        folder that lives as long as the trace, a path (of a .safetensors file) beside that file,
        and the trace is saved there.
    batch_size : prompts run together, padded to the longest.
    tokenizer : by default the model's own `.tokenizer`.    generate_options : passed on to `generate`.

    Raises ValueError: no prompts, an empty prompt, no tokenizer for texts, or hidden states of an
    architecture whose residual stream is of an unknown kind (`moelab.models.stream`)."""
    spec = spec_of(model)
    ids = token_ids(prompts, tokenizer or getattr(model, "tokenizer", None))
    around = streams(model) if hidden else []
    writer = _Writer(spec, _HiddenFiles(hidden) if hidden else None)
    hooks: list[Any] = []
    training = model.training
    model.eval()
    try:
        for stack, layers in stacks(model):
            hooks += _hook(stack, layers, writer, around)
        for first in progress(range(0, len(ids), batch_size), "recording", unit="batch"):
            chunk = ids[first : first + batch_size]
            inputs, mask = _pad(chunk, model)
            writer.begin(first, len(chunk), model.generation_config.eos_token_id)
            with torch.no_grad():
                run(model, inputs, mask, max_new_tokens, generate_options)
    except BaseException:
        if writer.sink is not None:
            writer.sink.close(KeyboardInterrupt)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    trace = writer.trace(identity(model))
    if hidden and hidden is not True:
        trace.save(hidden)
    return trace


def token_ids(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """Texts, `moelab.datasets.Prompt`s or lists of ids as lists of ids; ValueError for none, or an
    empty one."""
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; give a list of prompts, [prompt] for one")
    prompts = [getattr(p, "text", p) for p in prompts]
    if not prompts:
        raise ValueError("prompts is empty: give at least one, e.g. moelab.prompts('needle', 8)")
    if any(isinstance(p, str) for p in prompts):
        if tokenizer is None:
            raise ValueError(
                "these prompts are texts and the model has no tokenizer: pass tokenizer=…, or token ids"
            )
        prompts = [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in prompts]
    ids = [[int(t) for t in p] for p in prompts]
    if [] in ids:
        raise ValueError(f"prompt {ids.index([])} is empty: every prompt needs at least one token")
    return ids


def _pad(ids: list[list[int]], model: Any) -> tuple[Tensor, Tensor]:
    """(token ids, attention mask), both [B, S]: padded left for a decoder, right for an encoder."""
    pad, side = (
        model.generation_config.pad_token_id or 0,
        "right" if model.config.is_encoder_decoder else "left",
    )
    padded, mask = (
        nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), True, value, side).to(model.device)
        for rows, value in ((ids, pad), ([[1] * len(p) for p in ids], 0))
    )
    return padded, mask


def run(
    model: Any, ids: Tensor, mask: Tensor, max_new_tokens: int, options: dict[str, Any]
) -> None:
    """One batch through the model, without logits where nothing is to be generated; ids, mask [B,
    S]."""
    if max_new_tokens == 0 and not model.config.is_encoder_decoder:
        model.base_model(
            input_ids=ids, attention_mask=mask, use_cache=False
        )  # no logits: they can be gigabytes
    else:
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(max_new_tokens, 1),
            **greedy(model) | options,
        )


def _hook(
    stack: nn.Module, layers: list[MoELayer], writer: _Writer, around: list[Stream]
) -> list[Any]:
    me = threading.get_ident()

    def mine(function: Callable[..., None]) -> Callable[..., None]:
        """Of the passes that this thread runs, not those of others meanwhile."""
        return lambda *args: function(*args) if threading.get_ident() == me else None

    def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        writer.step(ids, kwargs.get("attention_mask"), [layer.index for layer in layers])

    hooks = [
        stack.register_forward_pre_hook(mine(before), with_kwargs=True),
        stack.register_forward_hook(mine(lambda *_: writer.flush())),
    ]
    for layer in layers:
        register, hook, options = layer.listening(mine(partial(writer.put, layer.index)))
        hooks.append(register(hook, **options))
        if around:
            hooks.append(
                layer.router.register_forward_pre_hook(
                    mine(lambda _m, args, i=layer.index: writer.see("router_inputs", i, args[0]))
                )
            )
            hooks.append(
                around[layer.index].entry.register_forward_pre_hook(
                    mine(lambda _m, args, i=layer.index: writer.see("residuals", i, args[0]))
                )
            )
    return hooks


class _Writer:
    """Collects one forward pass after another into the columns of a trace."""

    def __init__(self, spec: MoESpec, sink: _HiddenFiles | None) -> None:
        self.spec, self.sink = spec, sink
        self.columns: dict[str, list[Tensor]] = {name: [] for name in FIELDS}

    def begin(self, first: int, size: int, eos: int | list[int] | None) -> None:
        self.first, self.eos = first, torch.tensor([] if eos is None else eos, dtype=torch.long)
        self.seen: dict[tuple[int, ...], Tensor] = {}  # tokens so far of each sequence, per stack
        self.finished = torch.zeros(size, dtype=torch.bool)

    def step(self, tokens: Tensor, mask: Tensor | None, layers: list[int]) -> None:
        """A forward pass begins: tokens [B, S] go through `layers`."""
        tokens = tokens.cpu()
        B, S = tokens.shape
        keep = (
            torch.ones(B, S, dtype=torch.bool)
            if mask is None or mask.dim() != 2
            else mask[:, -S:].bool().cpu()
        )
        decoding = tuple(layers) in self.seen
        if decoding:  # what ended sequences compute is not used
            self.finished |= torch.isin(tokens[:, -1], self.eos)
            keep &= ~self.finished[:, None]
        before = self.seen.get(tuple(layers), torch.zeros(B, dtype=torch.long))
        self.rows = keep.reshape(-1)
        position = before[:, None] + keep.long().cumsum(1) - 1
        sequence = self.first + torch.arange(B)[:, None].expand(B, S)
        phase = torch.full((B, S), DECODE if decoding else PREFILL)
        self.seen[tuple(layers)] = before + keep.sum(1)
        for name, value, dtype in (
            ("phase", phase, torch.uint8),
            ("sequence", sequence, torch.int32),
            ("position", position, torch.int32),
            ("tokens", tokens, torch.int32),
        ):
            self.columns[name].append(value.reshape(-1)[self.rows].to(dtype))
        self.routed: dict[int, tuple[Tensor, Tensor]] = {}
        self.hidden: dict[str, Tensor] = {}  # [T, L, H], filled as layers run

    def put(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        if layer in self.routed:
            raise ValueError(
                f"MoE layer {layer} calls its experts more than once in a forward pass, so its routing "
                f"cannot be told from one call: it needs a line in moelab/models/dialects.py"
            )
        self.routed[layer] = ids, weights

    def see(self, name: str, layer: int, value: Tensor) -> None:
        value = value.reshape(-1, value.shape[-1]).cpu()[self.rows]
        if name not in self.hidden:
            self.hidden[name] = torch.zeros(
                len(value), self.spec.L, value.shape[-1], dtype=value.dtype
            )
        self.hidden[name][:, layer] = value

    def flush(self) -> None:
        """The forward pass is over: stack its layers."""
        T, L = int(self.rows.sum()), self.spec.L
        some = next(iter(self.routed.values()))[1]
        ids = torch.full((T, L, self.spec.K), self.spec.E, dtype=torch.int16)
        weights = torch.zeros((T, L, self.spec.K), dtype=some.dtype)
        for layer, (layer_ids, layer_weights) in self.routed.items():
            ids[:, layer] = layer_ids.cpu()[self.rows].to(torch.int16)
            weights[:, layer] = layer_weights.cpu()[self.rows].masked_fill(
                ids[:, layer] == self.spec.E, 0
            )
        self.columns["ids"].append(ids)
        self.columns["weights"].append(weights)
        if self.sink is not None:
            while self.hidden:
                name, values = self.hidden.popitem()
                self.sink.files[name].append(values)

    def trace(self, model_id: str) -> RoutingTrace:
        columns = {name: torch.cat(parts) for name, parts in self.columns.items()}
        hidden = self.sink.tensors() if self.sink is not None else {}
        return RoutingTrace(
            **columns,
            **hidden,
            spec=self.spec,
            model_id=model_id,
            _hidden_home=self.sink and self.sink.path,
            _keep=self.sink and self.sink.folder,
        )


class _HiddenFiles:
    """Hidden states, written as they come: beside a path, or in a temporary folder that lives as
    long as the trace."""

    def __init__(self, hidden: bool | str | Path) -> None:
        self.folder = (
            tempfile.TemporaryDirectory(prefix="moelab-trace-") if hidden is True else None
        )
        self.path = (
            Path(self.folder.name) / "trace.safetensors" if self.folder else Path(str(hidden))
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.files = {name: GrowingTensor(hidden_path(self.path, name), name) for name in HIDDEN}

    def close(self, error: type | None = None) -> None:
        for file in self.files.values():
            file.__exit__(error)

    def tensors(self) -> dict[str, Tensor]:
        """[T, L, H] each, mapped."""
        from safetensors import safe_open

        self.close()
        return {
            name: safe_open(hidden_path(self.path, name), "pt").get_tensor(name) for name in HIDDEN
        }
