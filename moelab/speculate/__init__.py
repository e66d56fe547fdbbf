"""Speculating experts: signals, predictors, their scores, and running a model on their predictions.

Source: Speculating Experts (§3, §4, §6, §8) and dataset-free prefetching (GPU-NDP, §III-D). A
predictor is made by `moelab.base.registry.make("predictor", name, model, …)`."""

from moelab.speculate.estimator import Estimator
from moelab.speculate.execution import MODES, Speculation
from moelab.speculate.predictors import INGREDIENTS, PREDICTORS, Predictor, takes
from moelab.speculate.signals import DefaultVectors, default_vectors
from moelab.speculate.training import train

__all__ = [
    "INGREDIENTS",
    "MODES",
    "PREDICTORS",
    "DefaultVectors",
    "Estimator",
    "Predictor",
    "Speculation",
    "default_vectors",
    "takes",
    "train",
]
