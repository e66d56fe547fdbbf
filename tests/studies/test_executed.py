"""Table 1 on a model: every way of executing predictions is scored beside the model as it is."""

import pytest

from moelab import open_model
from moelab.evaluation import accuracy
from moelab.models.identity import identity
from moelab.speculate import default_vectors
from moelab.speculate.estimator import ResidualEstimator
from notebooks.studies import executed


def test_every_way_has_a_row(tmp_path):
    lm = open_model()
    spec = lm.spec
    made = ResidualEstimator(spec.H, spec.E, spec.L, 8, model_id=identity(lm))
    made.vectors = default_vectors(lm, ["the red fox"])
    made.choice = (True,) * spec.L
    how = {"tasks": ("couples",), "ruler": (), "questions": 3, "tokens": 64}
    found = executed.run(str(made.save(tmp_path / "e.safetensors")), **how)
    (rows,) = found.values()
    assert list(rows) == [f"couples, {name}" for name in ("baseline", *executed.MODES)]
    # untrained it is the next router, and so are both ways that use it
    router, *others = (
        {name: of for name, of in rows[f"couples, {way}"].items()} for way in executed.MODES
    )
    assert others == [router, router] and router["from"] <= router["difference"] <= router["to"]
    alone = accuracy.compare(lm, {"as it is": executed.nullcontext}, ("couples",), n=3, tokens=64)
    assert rows["couples, baseline"]["score"] == alone["scores"]["couples"]["as it is"]["score"]


def test_without_an_estimator_it_says_which_command_makes_one():
    with pytest.raises(ValueError, match="`moelab train estimator MODEL FILE`"):
        executed.run()
