"""Every architecture of transformers with routed experts: a cheap check of many, the whole sweep of
a few."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moelab.models import discover, plug
from tests.depth import depth
from tests.models import sweep, tiny

#: a sample: those that differ most
FEW = [("dbrx", "bf16"), ("nemotron_h", "bf16"), ("longcat_flash", "fp32"), ("granitemoe", "bf16")]
RUN = [
    name
    for name in tiny.every()
    if "why not" not in sweep.table()["architectures"].get(name, {}).get("fp32", {})
]


def test_all_are_accounted_for_and_enough_are_exact():
    found = sweep.table()["architectures"]
    assert found.keys() == set(tiny.every()) and all(
        of.keys() == sweep.DTYPES.keys() for of in found.values()
    )
    exact = [
        name
        for name, of in found.items()
        if all(of[dtype] == dict.fromkeys(sweep.CHECKS, "exact") for dtype in sweep.DTYPES)
    ]
    assert len(exact) >= 45


def test_the_docs_show_what_the_last_sweep_found():
    text = sweep.PAGE.read_text()
    assert text.split(sweep.MARKS[0])[1].split(sweep.MARKS[1])[0].strip() == sweep.markdown(
        sweep.table()
    )


@pytest.mark.parametrize("name", RUN[:: depth(6, 1)])
def test_plugging_changes_no_bit(name, tmp_path):
    """In bf16, where orders and widths of sums show; a batch padded on the left, without a
    cache."""
    model = sweep.stock(tiny.save(name, tmp_path, torch.bfloat16))
    ids = torch.randint(3, 96, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    given |= {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        expected = model(**given).logits
        plug(model)
        assert torch.isfinite(expected).all() and torch.equal(model(**given).logits, expected)
    assert len(discover(model)) > 0


@pytest.mark.parametrize("name", [name for name in tiny.every() if name not in RUN])
def test_what_is_refused_says_why(name):
    said = sweep.table()["architectures"][name]["fp32"]["why not"]
    assert said.startswith("transformers ") or said == sweep.refused(name)


@pytest.mark.parametrize("name, dtype", depth(FEW, [*product(tiny.every(), sweep.DTYPES)]))
def test_everything_as_the_table_says(name, dtype):
    assert sweep.run(name, dtype) == sweep.table()["architectures"][name][dtype]
