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

from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.checkpoint.opening import spec_of
from moelab.models.forward import forward_info
from moelab.models.greedy import greedy
from moelab.models.identity import identity
from moelab.models.patches import Patches
from moelab.models.seam import MoELayer
from moelab.models.stream import stacks, streams
from moelab.trace import (
    DECODE,
    HIDDEN,
    PREFILL,
    RoutingTrace,
    growing_tensor,
    hidden_path,
    map_hidden,
)


def record(
    model: Any,
    prompts: Sequence[Any],
    max_new_tokens: int = 0,
    hidden: bool | str | Path = False,
    *,
    batch_size: int = 8,
    **generate_options: Any,
) -> RoutingTrace:
    """Run `prompts` and record the routing of prefill and decode; `sequence` counts prompts in the
    order given.

    model : any transformers MoE model, opened by moelab or not.
    prompts : texts, `moelab.prompts` or lists of token ids.
    max_new_tokens : tokens to generate greedily after each prompt; 0 records the prefill alone. The
        last token generated is never fed back, so n new tokens give n − 1 decode steps.
    hidden : also keep router inputs and residuals, [T, L, H] each, on disk: True in temporary files
        that last as long as the trace, a path (of a .safetensors file) beside that file, and the
        trace is saved there.
    batch_size : prompts run together, padded to the longest.
    generate_options : passed on to `generate`.

    Raises ValueError: no prompts, an empty prompt, no tokenizer for texts, or hidden states of an
    architecture whose residual stream is of an unknown kind (`moelab.models.stream`)."""
    ids = token_ids(prompts, getattr(model, "tokenizer", None))
    recorder = _Recorder(model)
    with tempfile.TemporaryDirectory(prefix="moelab-trace-") as folder:
        path = Path(folder, "trace.safetensors") if isinstance(hidden, bool) else Path(hidden)
        with Patches() as patches:
            appends = {
                name: patches.enter_context(growing_tensor(hidden_path(path, name), name))
                for name in (HIDDEN if hidden else ())
            }
            recorder.attach(patches, model, appends)
            patches.callback(model.train, model.training)
            model.eval()
            for first in progress(range(0, len(ids), batch_size), "recording", unit="batch"):
                inputs, mask = _pad(ids[first : first + batch_size], model)
                recorder.begin(first)
                with torch.no_grad():
                    run(model, inputs, mask, max_new_tokens, generate_options)
        # temporary files may go when they have been mapped
        trace = recorder.trace({name: map_hidden(path, name) for name in appends})
    if hidden and hidden is not True:
        trace.save(hidden, hidden=False)
    return trace


def token_ids(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """Texts, `moelab.prompts` or lists of ids as lists of ids; ValueError for none, or an
    empty one."""
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(
            "prompts is one string or empty; give a list, e.g. moelab.prompts('needle', 8)"
        )
    prompts = [getattr(p, "text", p) for p in prompts]
    if any(isinstance(p, str) for p in prompts) and tokenizer is None:
        raise ValueError("these prompts are texts and the model has no tokenizer: give token ids")
    prompts = [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in prompts]
    ids = [[int(t) for t in p] for p in prompts]
    if [] in ids:
        raise ValueError(f"prompt {ids.index([])} is empty: every prompt needs at least one token")
    return ids


def _pad(ids: list[list[int]], model: Any) -> tuple[Tensor, Tensor]:
    """(token ids, attention mask), both [B, S]: padded left for a decoder, right for an encoder."""
    side = "right" if model.config.is_encoder_decoder else "left"

    def padded(rows: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, True, value, side).to(model.device)

    rows = [torch.tensor(row) for row in ids]
    pad = model.generation_config.pad_token_id or 0
    return padded(rows, pad), padded([torch.ones_like(row) for row in rows], 0)


def run(model: Any, ids: Tensor, mask: Tensor, max_new_tokens: int, options: Record) -> None:
    """One batch through the model; ids, mask [B, S]."""
    if max_new_tokens == 0 and not model.config.is_encoder_decoder:
        # without the head: logits of all positions can be gigabytes
        model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    else:
        options = {"max_new_tokens": max(max_new_tokens, 1), **greedy(model), **options}
        model.generate(ids, attention_mask=mask, **options)


class _Recorder:
    """Collects one forward pass after another into the columns of a trace."""

    def __init__(self, model: Any) -> None:
        self.spec, self.model_id = spec_of(model), identity(model)
        eos = model.generation_config.eos_token_id
        self.eos = torch.tensor([] if eos is None else eos, dtype=torch.long)
        self.passes: list[dict[str, Tensor]] = []

    def begin(self, first: int) -> None:
        """A batch begins with this prompt."""
        self.first, self.finished = first, torch.tensor(False)  # becomes bool [B]

    def attach(
        self, patches: Patches, model: Any, appends: dict[str, Callable[[Tensor], None]]
    ) -> None:
        """Listen to the passes that this thread runs; `appends` take the hidden states, by name."""
        me = threading.get_ident()
        around = streams(model) if appends else []

        def mine(function: Callable[..., None]) -> Callable[..., None]:
            return lambda *args: function(*args) if threading.get_ident() == me else None

        def listen(module: nn.Module, name: str, layer: int) -> None:
            see = partial(self.see, name, layer)
            patches.hook(module.register_forward_pre_hook, mine(lambda _m, args: see(args[0])))

        for stack, layers in stacks(model):
            patches.hook(stack.register_forward_pre_hook, mine(self.step), with_kwargs=True)
            patches.hook(stack.register_forward_hook, mine(lambda *_: self.flush(appends)))
            for layer in layers:
                layer.listen(patches, mine(partial(self.put, layer)))
                if appends:
                    listen(layer.router, "router_inputs", layer.index)
                    listen(around[layer.index].entry, "residuals", layer.index)

    def step(self, _: nn.Module, args: tuple, kwargs: Record) -> None:
        """A forward pass of a stack begins, with tokens [B, S]."""
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        tokens = tokens.cpu()
        info = forward_info(args, kwargs)
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            mask = tokens.new_ones(len(tokens), info.cached + tokens.shape[1])
        mask = mask.cpu().long()
        S = tokens.shape[1]
        keep = mask[:, -S:].bool()
        if info.phase == "decode":  # what ended sequences compute is not used
            self.finished = self.finished | torch.isin(tokens[:, -1], self.eos)
            keep = keep & ~self.finished[:, None]
        sequence = self.first + torch.arange(len(tokens))[:, None].expand_as(tokens)
        phase = torch.full_like(tokens, DECODE if info.phase == "decode" else PREFILL)
        self.rows = keep.reshape(-1)
        self.now = {
            "phase": phase[keep].to(torch.uint8),
            "sequence": sequence[keep].int(),
            "position": (mask.cumsum(1)[:, -S:] - 1)[keep].int(),
            "tokens": tokens[keep].int(),
        }
        self.routed: dict[int, tuple[Tensor, Tensor]] = {}
        self.hidden: dict[str, Tensor] = {}  # [T, L, H], filled as layers run

    def put(self, layer: MoELayer, ids: Tensor, weights: Tensor) -> None:
        if layer.index in self.routed:
            raise ValueError(
                f"MoE layer {layer.index} calls its experts more than once in a forward pass, so its routing "
                f"cannot be told from one call: say how its router is read in moelab.models.dialects.ROUTING"
            )
        self.routed[layer.index] = layer.checked(ids, weights)

    def see(self, name: str, layer: int, value: Tensor) -> None:
        value = value.reshape(-1, value.shape[-1]).cpu()[self.rows]
        if name not in self.hidden:
            T, H = value.shape
            self.hidden[name] = torch.zeros(T, self.spec.L, H, dtype=value.dtype)
        self.hidden[name][:, layer] = value

    def flush(self, appends: dict[str, Callable[[Tensor], None]]) -> None:
        """The forward pass is over: stack its layers."""
        shape = len(self.now["tokens"]), self.spec.L, self.spec.K
        dtype = next(iter(self.routed.values()))[1].dtype
        self.now["ids"] = torch.full(shape, self.spec.E, dtype=torch.int16)
        self.now["weights"] = torch.zeros(shape, dtype=dtype)
        for layer, (ids, weights) in self.routed.items():
            ids = ids.cpu()[self.rows]
            weights = weights.cpu()[self.rows]
            self.now["ids"][:, layer] = ids.to(torch.int16)
            self.now["weights"][:, layer] = weights.masked_fill(ids == self.spec.E, 0)
        self.passes.append(self.now)
        for name, append in appends.items():
            append(self.hidden.pop(name))

    def trace(self, hidden: dict[str, Tensor]) -> RoutingTrace:
        columns = {name: torch.cat([one[name] for one in self.passes]) for name in self.passes[0]}
        return RoutingTrace(**columns, **hidden, spec=self.spec, model_id=self.model_id)
