"""Model and device cards: the geometry and the published figures of what the sources talk about,
one TOML file each.

A model card states the geometry (the fields of `MoESpec`) and its source, the published parameter
counts, which of the five papers uses the model, and notes on what a paper gets wrong. A device card
is a table of figures, each with unit, kind and source; "not re-read" and "second hand" mark what
was not checked against the named document."""

from __future__ import annotations

import tomllib
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict

from moelab.base.files import absolute
from moelab.base.registry import Entry, require
from moelab.base.schema import naming, typed
from moelab.base.specs import DeviceSpec, Figure, MoESpec

#: end of a figure's name → its unit
UNITS = {
    "gbs": "GB/s",
    "gb": "GB",
    "tflops": "TFLOPS",
    "tops": "TOPS",
    "ghz": "GHz",
    "w": "W",
    "ms": "ms",
    "mj": "mJ",
    "ratio": "1",
    "count": "1",
}


def load_card(name: str) -> dict[str, Any]:
    """The card of a model or a device as it stands in its file, with sources and notes. ValueError:
    there is none."""
    require("card", name, [*MODELS, *DEVICES])
    return _parse(files(__name__) / ("models" if name in MODELS else "devices") / f"{name}.toml")


@cache
def load_model(name: str) -> MoESpec:
    """The spec of a model card. ValueError: an unknown name."""
    require("card", name, MODELS)
    card = load_card(name)
    geometry = {key: value for key, value in card["geometry"].items() if key != "source"}
    where = geometry.pop("moe_layers")
    layers = range(where["first"], geometry["num_layers"], where["step"])
    return MoESpec(name=card["name"], moe_layers=tuple(layers), **geometry)


def other_bytes(spec: MoESpec) -> int:
    """Bytes of all weights but the routed experts: of a card's model the published parameters less
    the experts', otherwise as its geometry says."""
    figures = load_card(spec.name).get("figures", {}) if spec.name in MODELS else {}
    if (published := figures.get("total_params")) is None:
        return round(spec.dense_bytes)
    whole = load_model(spec.name)  # a trace may have fewer layers
    return round((published["value"] - whole.L * whole.E * whole.expert_params) * 2)


def card_of(text: str) -> str | None:
    """The name of the model card that a text is the name or the hub id of, ignoring case."""
    names = ({name.lower(), load_card(name).get("hub", "").lower()} for name in MODELS)
    return next((name for name, its in zip(MODELS, names) if text.lower() in its), None)


def load_device(name: str | Path | DeviceSpec) -> DeviceSpec:
    """The spec of a device card, by its name or by the path of your own, a .toml; a spec is what it
    is. ValueError: there is none."""
    if isinstance(name, DeviceSpec):
        return name
    own = Path(name).suffix == ".toml"
    if not own:
        require("card", name, DEVICES)
    card = _parse(absolute(name)) if own else load_card(name)
    with naming(name, "device card", "writing it as those in moelab/cards/devices"):
        found = typed(card, _DeviceCard)
        for key, figure in found["figures"].items():
            if UNITS.get(key.rpartition("_")[2]) != figure.unit or figure.value <= 0:
                raise ValueError(
                    f"figures.{key} is {figure.value} {figure.unit}; it must be above 0 and "
                    f"in the unit that its name ends in: _{', _'.join(UNITS)}"
                )
        return DeviceSpec(found["name"], found["figures"])


class _DeviceCard(TypedDict):
    name: str
    figures: dict[str, Figure]


def entries_of(kind: str, load: Any, describe: Any) -> dict[str, Entry]:
    """Card name → what loads it, of the folder `kind`; `describe` says in a phrase what is on
    it."""
    cards = (Path(file.name) for file in (files(__name__) / kind).iterdir())
    names = sorted(card.stem for card in cards if card.suffix == ".toml")
    return {name: Entry(partial(load, name), partial(describe, name)) for name in names}


def _describe_model(name: str) -> str:
    spec = load_model(name)
    return f"{spec.L} MoE layers of {spec.E} experts, {spec.K} a token"


def _describe_device(name: str) -> str:
    device = load_device(name)
    return f"{device.name}, {device['memory_bandwidth_gbs']:,g} GB/s from memory"


def _parse(file: Any) -> dict[str, Any]:
    with naming(file, "card", "writing it as those in moelab/cards"):
        return tomllib.loads(file.read_text(encoding="utf-8"))


#: card name → what loads its spec
MODELS = entries_of("models", load_model, _describe_model)
DEVICES = entries_of("devices", load_device, _describe_device)
