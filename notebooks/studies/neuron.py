"""Plans for six models on AWS Neuron, as docs/guide/neuron.md shows them: `python -m notebooks.studies.neuron`."""

from __future__ import annotations

from moelab.advice.neuron import Bound, plan
from moelab.base.table import duration, markdown_table, size

#: model card → logical cores, sequences that decode together
MODELS = {
    "Mixtral-8x7B": (8, 16),
    "Qwen3-30B-A3B": (16, 16),
    "GPT-OSS-120B": (16, 32),
    "Llama4-Scout": (16, 16),
    "Qwen3-235B-A22B": (64, 16),
    "DeepSeek-V3": (64, 32),
}
CONTEXT = 4096
HEAD = ["model, cores, batch", "weights", "TP × EP", "B, halves", "HBM a core", "prompt", "token"]


def table() -> str:
    """A row a model: the plan for prompts of `CONTEXT` tokens, and the bound of each phase."""
    rows = []
    for name, (cores, batch) in MODELS.items():
        made = plan(name, cores=cores, batch=batch, context=CONTEXT)
        rows.append(
            [
                f"{name}, {cores}, {batch}",
                made.weights,
                f"{made.way.tp} × {made.way.ep}",
                f"{made.block_size}, {made.shard}",
                size(made.nbytes),
                _words(made.bound("prefill")),
                _words(made.bound("decode")),
            ]
        )
    return markdown_table(HEAD, rows)


def _words(bound: Bound | None) -> str:
    return "–" if bound is None else f"{duration(bound.seconds)}, {bound.limited_by}"


if __name__ == "__main__":
    print(table())
