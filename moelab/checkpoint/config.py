"""config.json of a checkpoint: read, checked before transformers builds anything of it, and what
it says of quantisation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from moelab.base.configs import quantisation
from moelab.base.schema import blamed
from moelab.store.headers import read_json

#: names of what a config counts, and constructing a model takes time for
COUNTS = re.compile(r"^(?!.*(?:size|feature))(.*_)?(layers?|experts?|heads|blocks)(_|$)")


def load_config(folder: Path) -> Any:
    """The transformers config of a checkpoint folder.

    Raises ValueError: a model_type that transformers does not know, code or files from outside the
    folder, counts that no model has, values that make no config."""
    import transformers

    file = folder / "config.json"
    fields = read_json(file)
    model_type = fields.get("model_type")
    if model_type == "deepseek":
        import moelab.models.deepseek  # noqa: F401  (makes transformers know it)
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        own = ". It comes with code of its own (auto_map), which is never run here"
        raise ValueError(
            f"transformers {transformers.__version__} does not know model_type {str(model_type)[:80]!r} "
            f"({file}): upgrade transformers, or check the config{own * ('auto_map' in fields)}"
        )
    _check_fields(file, fields)
    with blamed(file, f"it is no config of a {model_type} model"):
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        for inner in (getattr(config, name, None) for name in type(config).sub_configs):
            if quantisation(inner) and not quantisation(config):
                config.quantization_config = (
                    vars(inner).pop("quantization_config", None) or inner.quantization
                )
    said = getattr(getattr(config, "attn_config", None), "rope_theta", None)
    if said is not None and said != (read := config.rope_parameters["rope_theta"]):
        raise ValueError(
            f"{file} says rope_theta = {said} in attn_config, where transformers "
            f"{transformers.__version__} does not look: it would turn positions by {read}. Write "
            f'"rope_theta": {said} beside attn_config, too'
        )
    beside = folder / "hf_quant_config.json"  # of modelopt, which the config need not mention
    if beside.is_file() and not quantisation(config):
        with blamed(beside, "it says no quantization"):
            said = dict(read_json(beside)["quantization"])
        config.quantization_config = {"quant_method": "modelopt"} | said
    return config


def _check_fields(file: Path, fields: dict[str, Any]) -> None:
    """ValueError for what transformers would fetch from elsewhere, or build for hours."""
    for name in ("attn_implementation", "_attn_implementation", "transformers_weights"):
        if "/" in str(fields.get(name, "")):
            raise ValueError(f"{file} asks for {name} from outside the folder; remove that line")
    for part in [fields, *(value for value in fields.values() if isinstance(value, dict))]:
        for name, value in part.items():
            most = 2_000 if "layer" in name else 100_000
            if COUNTS.search(name) and type(value) in (int, float) and not 0 <= value < most:
                raise ValueError(f"{file} says {name} = {value:,}, which no model has; correct it")
