"""What rounding changes of the loss, the distribution and the answers, against a model that nothing
was changed of."""

import torch

from moelab import open_model
from moelab.evaluation.accuracy import TASKS, task_prompts
from moelab.evaluation.scores import right_answers, text_windows
from moelab.models import plugged
from notebooks.studies import rounding


def test_answers_and_losses_are_those_of_the_experts_that_are_there():
    model = open_model()
    windows = text_windows(model.tokenizer, "test", 2, 64, 0)
    asked = [p for of in TASKS if of != "loss" for p in task_prompts(model.tokenizer, of, 2, 64, 0)]
    with torch.no_grad():
        own = right_answers(model, asked)
        with plugged(model):
            compared = rounding.Compared(model, windows, 0, questions=2)
            loss, kl, right = compared.changed(lambda *_: None)
            _, gone, wrong = compared.changed(
                lambda _, e, tensors: [w.zero_() for w in tensors.values()]
            )
            _, less, _ = compared.rounded(lambda *_: "int8", None)
            unasked = compared.changed(lambda *_: None, ask=False)[2]
    assert not loss.any() and abs(kl).max() < 1e-6 and right.tolist() == own
    assert 0 < less.mean() < gone.mean() and wrong.sum() < right.sum() == unasked.sum()
