"""What tests ask of stores and checkpoints: the model of a store by its `StoreExperts`, and whose a
folder is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.opening import open_checkpoint
from moelab.models import plug
from moelab.store.layout import ExpertStore
from moelab.store.reader import StoreExperts, cast


def open_store(store: ExpertStore | Path, **options: Any) -> Any:
    """The model of a store, its experts read from there one by one; options as of `Reader`."""
    store = store if isinstance(store, ExpertStore) else ExpertStore(store)
    model = open_checkpoint(store.folder, experts="external")
    source = StoreExperts(store, **options)
    plug(model, source=lambda layer, expert: cast(source(layer, expert), model.dtype))
    return model


def identity_of(folder: Path) -> str:
    """The identity of a checkpoint or store."""
    return Checkpoint.at(folder).identity
