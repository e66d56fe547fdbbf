"""Files of other programs, written here: each writer takes a trace and writes what the program
would have."""

from __future__ import annotations

import base64
import io
import json
import struct

import numpy as np
import torch
from safetensors.torch import save_file

from moelab.base.specs import MoESpec
from moelab.trace import DECODE, PREFILL, RoutingTrace, save_arrays


def routed(lengths, L=2, E=6, K=2, seed=0):
    """A trace of sequences of so many tokens, of which the first 2, 3, … are prefill; every cell has
    K experts."""
    g = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    position = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    spec = MoESpec("sample", "", L, tuple(range(L)), E, K, H=0, I=0)
    return RoutingTrace.of_ids(
        torch.rand(T, L, E, generator=g).topk(K, -1).indices,
        spec,
        weights=torch.rand(T, L, K, generator=g),
        sequence=sequence.int(),
        position=position.int(),
        phase=torch.where(position < 2 + sequence, PREFILL, DECODE).to(torch.uint8),
        tokens=torch.randint(0, 99, (T,), generator=g).int(),
    )


def arrays(path, trace):
    save_arrays(trace, path)


def safetensors(path, trace):
    names = ("ids", "weights", "phase", "sequence", "position", "tokens")
    tensors = {name: getattr(trace, name).contiguous() for name in names}
    save_file(tensors | {"experts": torch.tensor(trace.spec.E)}, path)


def vllm(path, trace):
    responses = []
    for number in range(trace.sequences):
        mine = trace.sequence == number
        ids, prompt = trace.ids[mine].numpy(), int((trace.phase[mine] == PREFILL).sum())
        packed = io.BytesIO()
        np.save(packed, ids[prompt:])
        before, after = ids[:prompt].tolist(), base64.b64encode(packed.getvalue()).decode()
        choice = {"index": 0, "routed_experts": after, "finish_reason": "stop"}
        response = {"choices": [choice], "prompt_routed_experts": before}
        if number % 2:  # all in the choice, as lists
            choice["routed_experts"] = ids.tolist()
            response = {"choices": [choice], "usage": {"prompt_tokens": prompt}}
        responses.append(response)
    path.write_text(json.dumps(responses))


def sglang(path, trace):
    """Prompts are extended together, then each pass decodes a token of every sequence that has
    one. Layers are wider than K, physical experts are logical ones in reverse, and dense layers lie
    between."""
    records = []
    E, K = trace.spec.E, trace.spec.K
    decode = trace.phase == DECODE
    turn = torch.where(decode, trace.position - 1 - trace.sequence, 0)
    for step in range(int(turn.max()) + 1):
        rows = torch.nonzero(turn == step)[:, 0]
        ids = torch.full((2 * trace.spec.L, len(rows), 8), -1, dtype=torch.int32)
        ids[1::2, :, :K] = (E - 1 - trace.ids[rows]).swapaxes(0, 1).int()
        lengths = torch.bincount(trace.sequence[rows].long()).tolist()
        records.append(
            {
                "forward_pass_id": step,
                "rank": 0,
                "forward_mode": 2 if step else 1,
                "input_ids": trace.tokens[rows].tolist(),
                "positions": trace.position[rows].tolist(),
                "extend_seq_lens": None if step else lengths,
                "topk_ids_of_layer": ids,
                "misc_objects": [],
            }
        )
    backwards = torch.arange(E).flip(0).expand(2 * trace.spec.L, E).contiguous()
    torch.save({"records": records, "last_physical_to_logical_map": backwards}, path)


def megatron(path, trace):
    """One step for a prompt, one for each token after it."""
    starts = torch.nonzero((trace.phase == DECODE) | (trace.position == 0))[:, 0].tolist()
    lines = []
    for step, rows in enumerate(torch.tensor_split(torch.arange(len(trace)), starts[1:])):
        for layer in reversed(range(trace.spec.L)):
            ids = trace.ids[rows, layer].tolist()
            about = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer}
            about |= {"rank": 0, "num_tokens": len(ids), "topk": trace.spec.K}
            lines.append(json.dumps(about | {"top_indices": ids, "hs_offset": 7}))
    lines.append(json.dumps(json.loads(lines[0]) | {"block": "mtp", "mtp_idx": 0}))
    path.write_text("\n".join(lines) + "\n")


def route_csv(path, trace):
    """Prefill layer by layer, decode token by token."""
    spec = trace.spec
    lines = [
        "# route_trace v1",
        f"# model=x.gguf n_layer={spec.L} n_expert={spec.E} n_expert_used=2",
    ]
    lines.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")
    rows = [(t, layer) for t in range(len(trace)) for layer in range(spec.L)]
    rows.sort(
        key=lambda at: (trace.sequence[at[0]], trace.phase[at[0]] == DECODE and at[0], at[1], at[0])
    )
    for t, layer in rows:
        for slot in range(spec.K):
            about = [trace.sequence[t], trace.phase[t], trace.position[t]]
            weight = float(trace.weights[t, layer, slot])
            values = [*map(int, about), layer, slot, int(trace.ids[t, layer, slot]), weight, 1, 64]
            lines.append(",".join(map(str, values)))
    path.write_text("\n".join(lines) + "\n")


#: file name → (its writer, the columns that the format keeps)
ALL = ("ids", "weights", "phase", "sequence", "position", "tokens")
TRACES = {
    "t.npz": (arrays, ALL),
    "t.npy": (arrays, ("ids",)),
    "t.safetensors": (safetensors, ALL),
    "t.json": (vllm, ("ids", "phase", "sequence", "position")),
    "t.pt": (sglang, ("ids", "phase", "sequence", "position", "tokens")),
    "t.jsonl": (megatron, ("ids", "phase", "sequence", "position")),
    "t.csv": (route_csv, ("ids", "weights", "phase", "sequence", "position")),
}


def hot_csv(path, counts):
    lines = ["layer,expert"]
    for layer, row in enumerate(counts):
        lines += [f"{layer},{expert}" for expert, n in enumerate(row) for _ in range(n)]
        lines.append("layer,expert")  # of the next file, joined by cat
    path.write_text("\n".join(lines))


def counted_csv(path, counts):
    lines = [f"{la},{e},{n}" for la, row in enumerate(counts) for e, n in enumerate(row)]
    path.write_text("\n".join(["layer,expert,count", *lines]))


def imatrix(path, counts, K=2):
    """A GGUF file of version 3: fields, tensor infos, aligned tensors."""
    tensors = {}
    for layer, row in enumerate(counts):
        tensors[f"blk.{layer}.ffn_gate_inp.weight.counts"] = [sum(row) / K]
        tensors[f"blk.{layer}.ffn_down_exps.weight.in_sum2"] = [0.5] * 3 * len(row)
        tensors[f"blk.{layer}.ffn_down_exps.weight.counts"] = row
    text = lambda words: struct.pack("<Q", len(words)) + words.encode()  # noqa: E731
    fields = [text("general.type") + struct.pack("<I", 8) + text("imatrix")]
    fields.append(text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("wiki.txt"))
    fields.append(text("imatrix.chunk_count") + struct.pack("<II", 4, 7))
    infos, data = b"", b""
    for name, values in tensors.items():
        infos += text(name) + struct.pack("<IQIQ", 1, len(values), 0, len(data))
        data += np.array(values, "<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields) + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


POPULARITY = {"p.csv": hot_csv, "q.csv": counted_csv, "imatrix.gguf": imatrix}
