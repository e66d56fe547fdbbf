"""A model without its weights: its geometry, the bytes of all that is not experts, and how its
experts may be stored.

Everything follows from a card, a config or a checkpoint's headers; only a config is ever
downloaded. No torch, unless a config leaves its facts to transformers' defaults."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moelab.base import registry
from moelab.base.configs import geometric_bytes, language_model, spec_from_config
from moelab.base.files import from_hub, small_model
from moelab.base.specs import DTYPE_BYTES, MoESpec
from moelab.cards import card_of, load_card, load_model, other_bytes

#: how bf16 experts may be stored and multiplied as they lie → bits a weight: `moelab.store`
FORMS = {"bf12": 12, "int8": 8.5, "fp8": 8.002, "int4": 4.5, "mxfp4": 4.25}
AS_IS = "as it is"
LOSSLESS = (AS_IS, "bf12")
GUESSED = "estimated from its geometry"


@dataclass(frozen=True)
class Model:
    """A model without its weights: what opens it, its geometry, bytes of all other weights and how
    they are known, its folder if it is here, the form that an expert store has, how many tokens a
    sequence may have, if that is known, how many bytes of weights are to be downloaded, and the bytes
    of an expert in a file of GGUF."""

    source: str
    spec: MoESpec
    others: int
    how: str
    folder: Path | None = None
    stored: str | None = None
    most: int | None = None
    download: int = 0
    expert: int = 0

    @property
    def dense(self) -> int:
        """Bytes of other weights that a token needs: of the embedding one row, but all of the
        head."""
        return max(self.others - self.spec.vocab * self.spec.H * 2, 0)

    @property
    def multiplied(self) -> float:
        """Weights that each token of a prompt is multiplied by: all but the head's."""
        spec = self.spec
        layers = self.dense / 2 - spec.vocab * spec.H
        return spec.L * spec.K * spec.expert_params + max(layers, 0)

    def expert_bytes(self, form: str) -> int:
        """Bytes of an expert as it is computed."""
        form = self.stored if form == AS_IS else form
        if form in FORMS:
            return round(self.spec.expert_params * FORMS[form] / 8)
        return form == self.stored and self.expert or self.spec.expert_bytes

    def forms(self) -> list[str]:
        """How its experts may be stored, of what is multiplied as it lies, lossless forms first."""
        spec = self.spec
        # what has to be decoded before it is multiplied is not compared by its bytes
        if self.expert:
            return [AS_IS]
        forms = [AS_IS] if self.stored in (None, "raw", *FORMS) else []
        bits = FORMS.get(self.stored, 8 * DTYPE_BYTES[spec.dtype])
        if bits > 12 and spec.dtype == "bfloat16":
            forms.append("bf12")
        # `moelab.store.fewbit.GROUP`, without torch
        if bits > 8.5 and spec.H % 32 == spec.I % 32 == 0:
            forms += [form for form in FORMS if form not in LOSSLESS]
        return forms


def find_model(model: str | Path | None) -> Model:
    """A model's geometry and bytes, without its weights. Raises FileNotFoundError, ValueError."""
    text = str(model)
    path = small_model() if model is None else Path(model).expanduser()
    home, is_here = path, path.exists()
    if not is_here and (name := card_of(text)):
        spec, card = load_model(name), load_card(name)
        published = "total_params" in card.get("figures", {})
        how = "published parameters less the experts'" if published else GUESSED
        return _to_download(Model(card.get("hub", name), spec, other_bytes(spec), how))
    if not is_here and "/" not in text and not path.with_name(f"{text}.part").exists():
        registry.require("folder here and no model card", text, registry.names("model"))
    if not is_here and text.count("/") == 1:
        home = from_hub(text, ["config.json", "hf_quant_config.json"])
    if (file := home / "config.json").is_file() and not any(path.glob("*.safetensors")):
        spec, config = _read_config(file, path.resolve().name if is_here else text)
        found = Model(text, spec, geometric_bytes(spec, config), GUESSED, most=_most(config))
        return found if is_here else _to_download(found)
    from moelab.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint.at(model)
    folder, spec, store = checkpoint.folder, checkpoint.spec, checkpoint.store
    stored, each = store and (store.quantized or store.codec), 0
    if checkpoint.gguf is not None:
        others, experts = checkpoint.gguf.divided(checkpoint.plan.expert_keys)
        stored, each = "gguf", experts // (spec.L * spec.E)
    else:
        others = sum(entry.nbytes for entry in checkpoint.tensors.values())
        others = others if store else max(others - spec.experts_bytes, 0)
    most = _most(checkpoint.config)
    return Model(str(folder), spec, others, "exact", folder, stored, most, expert=each)


def _to_download(model: Model) -> Model:
    """A model on the hub, with the bytes of its weights that are not in the hub client's cache."""
    if "/" not in model.source:  # a card's own, which the hub does not have
        return model
    from huggingface_hub.constants import HF_HUB_CACHE

    kept = Path(HF_HUB_CACHE, f"models--{model.source.replace('/', '--')}", "blobs")
    here = sum(file.stat().st_size for file in kept.glob("*"))
    return replace(model, download=max(model.spec.experts_bytes + model.others - here, 0))


def _most(config: Any) -> int | None:
    """Tokens of a sequence that a config allows."""
    most = getattr(language_model(config), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _read_config(file: Path, name: str) -> tuple[MoESpec, Any]:
    """Geometry and config, by the file's own words; what it leaves to transformers' defaults, by
    transformers."""
    if not file.with_name("hf_quant_config.json").exists():  # which `load_config` reads, too
        with suppress(ValueError, AttributeError, TypeError):
            config = json.loads(
                file.read_text(), object_hook=lambda fields: SimpleNamespace(**fields)
            )
            return spec_from_config(config, name), config
    from moelab.checkpoint.config import load_config

    config = load_config(file.parent)
    return spec_from_config(config, name), config
