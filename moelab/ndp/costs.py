"""T_w, T_g, T_n and T_a of GPU-NDP §III-C from a model's geometry and a machine's rates, and what
does not fit.

Every time is a roofline: bytes over a bandwidth or operations over a rate, whichever takes longer;
in seconds. A number of tokens n may be an array.

    transfer()             T_w  one expert's weights over the link
    gpu(n), unit(n), cpu(n)     one expert of n tokens on the GPU, T_g; on one unit, T_n · N; on the
                                host
    activation             T_a  one token's hidden state over the link, one way

A message over the link takes `Hardware.latency` before its first byte: each hidden state and each
piece of an expert is one. Not modelled: launch latencies, activation functions, columns that N does
not divide (below 1 %)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moelab.base.specs import DTYPE_BYTES, MoESpec
from moelab.ndp.hardware import Hardware

ACTIVATION_BYTES = 2  # bf16 hidden states, keys and values


class NotSupported(ValueError):
    """This model does not fit this machine: the N.S. of the paper's Figs. 9 to 11."""


@dataclass(eq=False)
class Costs:
    """Times of one model on one machine."""

    spec: MoESpec
    hardware: Hardware

    def transfer(self, pieces: int = 1) -> float:
        """Seconds of sending an expert to the GPU over the link, in so many messages."""
        return self.spec.expert_bytes / self.hardware.link + pieces * self.hardware.latency

    def gpu(self, n: np.ndarray | float) -> np.ndarray:
        """Seconds that the GPU computes an expert for n tokens each: the longer of reading its
        weights and of multiplying."""
        return self._roofline(n, self.hardware.gpu_bandwidth, self.hardware.gpu_flops)

    def unit(self, n: np.ndarray | float) -> np.ndarray:
        """As `gpu`, of one unit, which reads and multiplies a whole expert."""
        return self._roofline(n, self.hardware.unit_bandwidth, 2 * self.hardware.unit_macs)

    def cpu(self, n: np.ndarray | float) -> np.ndarray:
        """As `gpu`, of the host, which reads the expert from its own memory."""
        return self._roofline(n, self.hardware.host_bandwidth, self.hardware.host_flops)

    @cached_property
    def activation(self) -> float:
        """Seconds of sending one token over the link, in a message of its own."""
        return ACTIVATION_BYTES * self.spec.H / self.hardware.link + self.hardware.latency

    def balance_terms(self, n: float = 1.0, pieces: int = 1) -> dict[str, float]:
        """The arguments of `moelab.ndp.balance.balance` for experts of n tokens, sent in so many
        pieces."""
        return {
            "T_w": self.transfer(pieces),
            "T_g": float(self.gpu(n)),
            "T_n": float(self.unit(n)) / self.hardware.units,
            "T_a": self.activation,
            "K": self.spec.K,
            "N": self.hardware.units,
        }

    def _roofline(self, n: np.ndarray | float, bandwidth: float, flops: float) -> np.ndarray:
        n = np.asarray(n, float)
        time = np.maximum(
            self.spec.expert_bytes / bandwidth, 2 * self.spec.expert_params * n / flops
        )
        return np.where(n > 0, time, 0.0)

    def kv_bytes(self, positions: int) -> int:
        """Bytes of keys and values of that many tokens, of all layers."""
        s = self.spec
        return positions * 2 * ACTIVATION_BYTES * s.num_layers * s.kv_heads * s.head_dim

    def dense_prefill(self, S: int) -> float:
        """Seconds of everything but the routed experts for a prompt of S tokens; the LM head runs
        once."""
        s = self.spec
        h = self.hardware
        attention = 2 * s.num_layers * s.heads * s.head_dim * S * S
        head = s.vocab * s.H
        flops = 2 * S * (s.dense_params - head) + 2 * head + attention
        return max(flops / h.gpu_flops, (s.dense_bytes + self.kv_bytes(S)) / h.gpu_bandwidth)

    def dense_decode(self, positions: int) -> float:
        """Seconds of everything but the routed experts for a token with so many before it."""
        weights = self.spec.dense_params * max(2.0, DTYPE_BYTES[self.spec.dtype])
        read = (weights + self.kv_bytes(positions)) / self.hardware.gpu_bandwidth
        return max(read, 2 * self.spec.dense_params / self.hardware.gpu_flops)

    def free_gpu_bytes(self, tokens: int) -> float:
        """Left beside weights, keys and values of that many tokens, and two experts' buffers for
        weights in transit."""
        return (
            self.hardware.gpu_memory
            - self.spec.dense_bytes
            - self.kv_bytes(tokens)
            - 2 * self.spec.expert_bytes
        )

    def check(self, tokens: int, home: str, fullest: int = 0) -> None:
        """Raise `NotSupported` where the experts do not fit their home ("units" or "host"), or the
        rest the GPU.

        fullest : whole experts of all layers on the fullest unit; 0 where each expert is spread
        over all units."""
        h = self.hardware
        room = h.units * h.unit_memory if home == "units" else h.host_memory
        on_one = fullest * self.spec.expert_bytes if home == "units" else 0
        for what, where, needed, there in (
            ("experts", f"the {home}", self.spec.experts_bytes, room),
            ("whole experts", "the fullest unit", on_one, h.unit_memory),
            ("attention, embeddings, shared experts", "the GPU", -self.free_gpu_bytes(tokens), 0),
        ):
            if needed > there:
                raise NotSupported(
                    f"{self.spec.name}: {what} are {(needed - there) / 1e9:.2f} GB too large for "
                    f"{where} of {h.name}; use more units, a larger GPU, or a system with tensor "
                    "parallelism, which spreads every expert over all units"
                )
