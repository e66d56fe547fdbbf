"""The comparison of policies: its counts against a loop."""

import torch

from moelab.bench import evictions as bench
from moelab.specs import MoESpec
from moelab.trace import DECODE, RoutingTrace


def test_misses_are_what_a_list_counts():
    spec = MoESpec("made", "qwen3_moe", 2, (0, 1), 6, 2, 8, 8, vocab=9, heads=1, kv_heads=1, head_dim=8)
    ids = torch.rand(30, 2, 6, generator=torch.Generator().manual_seed(0)).topk(2).indices.to(torch.int16)
    row = torch.arange(30)
    trace = RoutingTrace(ids, torch.ones(ids.shape), torch.full((30,), DECODE), row % 3, row // 3, row, spec, "")
    recent, missed = [], [0, 0, 0]                                      # the last used comes last
    for t in sorted(range(30), key=lambda t: t % 3):                    # prompt after prompt
        for layer in range(2):
            wanted = [(layer, e) for e in sorted(ids[t, layer].tolist())]
            missed[t % 3] += sum(key not in recent for key in wanted)
            recent = ([key for key in recent if key not in wanted] + wanted)[-6:]
    assert bench.misses(trace, "lru", "model", 0.5).tolist() == missed


def test_every_other_prompt_is_compared():
    spec = MoESpec("made", "qwen3_moe", 2, (0, 1), 6, 2, 8, 8, vocab=9, heads=1, kv_heads=1, head_dim=8)
    ids = torch.rand(60, 2, 6, generator=torch.Generator().manual_seed(0)).topk(2).indices.to(torch.int16)
    row, hidden = torch.arange(60), torch.randn(60, 2, 8)
    trace = RoutingTrace(ids, torch.ones(ids.shape), torch.full((60,), DECODE), row % 6, row // 6, row, spec, "",
                         router_inputs=hidden, residuals=hidden)
    found = bench.missed(trace, trace, "0.5", {"LRU": ("lru", "model"), "ours": bench.OURS})[0.5]
    some = trace.select(trace.sequence % 2 == 0)
    assert found["LRU"].tolist() == [n for n in bench.misses(some, "lru", "model", 0.5).tolist() if n]
    assert len(found["LRU"]) == len(found["ours"]) == 3
