"""The routing of one prompt and its answer, from a recorded trace or from a popularity model with
two parameters.

Experts of a layer have Zipf popularity in an order drawn per layer; each prompt multiplies it by a
log-normal bias of its own, which makes its prefill a better predictor of its decode than other
prompts are (GPU-NDP §III-D, Fig. 6). Tokens choose independently of each other; in recorded traces
neighbouring tokens and layers choose alike.

    weight[l, e] = rank(l, e)^(−zipf) · exp(bias · normal[l, e])
    K a token, without replacement
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelab.base.specs import MoESpec
from moelab.trace import DECODE, RoutingTrace


@dataclass(frozen=True, eq=False)
class PromptRouting:
    """The choices of one prompt and its answer.

    prefill, decode : int16 [S, L, K] and [D, L, K], expert ids; E where none ran.
    history : float [L, E], expert popularity on other prompts, as calibration knows it."""

    spec: MoESpec
    prefill: np.ndarray
    decode: np.ndarray
    history: np.ndarray

    @classmethod
    def of(cls, trace: RoutingTrace, sequence: int = 0) -> PromptRouting:
        """One sequence of a trace; its history are the other sequences. Of a trace that is all of
        one phase, the first half of the sequence stands for its prompt.

        Raises ValueError: the trace has no such sequence, or the sequence lacks a prefill or a
        decode."""
        mine = trace.sequence == sequence
        ids = trace.ids[mine].numpy()
        answers = (trace.phase[mine] == DECODE).numpy()
        if len(trace.phase.unique()) == 1:
            answers = np.arange(len(ids)) >= len(ids) // 2
        parts = ids[~answers], ids[answers]
        if not all(map(len, parts)):
            raise ValueError(
                f"sequence {sequence} of the trace has {len(parts[0])} prefill and "
                f"{len(parts[1])} decode tokens and both are needed; the trace has sequences 0 to "
                f"{trace.sequences - 1}"
            )
        history = trace.select(~mine).counts().numpy().astype(float)
        return cls(trace.spec, *parts, history=history)

    def counts(self) -> np.ndarray:
        """Tokens of the prompt that chose each expert: int64 [L, E]."""
        return counted(self.prefill, self.spec.E)


def looked_up(table: np.ndarray, ids: np.ndarray, none: float) -> np.ndarray:
    """What a table [L, E] says of choices [T, L, K]: [T, L, K]; `none` of "no expert"."""
    padded = np.pad(table, ((0, 0), (0, 1)), constant_values=none)
    return padded[np.arange(len(table))[:, None], ids]


def counted(ids: np.ndarray, E: int) -> np.ndarray:
    """Tokens that chose each expert, of ids [T, L, K]: int64 [L, E]; "no expert" is none."""
    L = ids.shape[1]
    flat = ids.astype(np.int64) + np.arange(L)[:, None] * (E + 1)
    return np.bincount(flat.ravel(), minlength=L * (E + 1)).reshape(L, E + 1)[:, :E]


def simulated_routing(
    spec: MoESpec,
    seed: int = 0,
    prompt: int = 512,
    answer: int = 512,
    zipf: float = 0.2,
    bias: float = 0.3,
) -> PromptRouting:
    """One prompt of the popularity model.

    zipf : exponent of the popularity; 0 is uniform. bias : standard deviation of a prompt's
    log-weights; 0 is none."""
    if min(zipf, bias) < 0 or min(prompt, answer) < 1:
        raise ValueError(
            f"zipf is {zipf}, bias {bias}, the prompt {prompt} and the answer {answer} tokens; the "
            "first two are 0 or more, the others at least 1"
        )
    rng = np.random.default_rng(seed)
    L, E, K = spec.L, spec.E, spec.K
    popularity = -zipf * np.log1p(rng.permuted(np.tile(np.arange(E), (L, 1)), axis=1))  # [L, E]
    weights = (popularity + bias * rng.standard_normal((L, E))).astype(np.float32)
    ids = np.empty((prompt + answer, L, K), np.int16)
    for layer in range(L):
        gumbel = rng.gumbel(size=(prompt + answer, E)).astype(np.float32)
        ids[:, layer] = np.argpartition(-(weights[layer] + gumbel), K - 1, axis=1)[:, :K]
    return PromptRouting(spec, ids[:prompt], ids[prompt:], np.exp(popularity))
