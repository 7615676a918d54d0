"""YAML files and flags become a TrainingConfig. Both take the same names, and flags win.

An unknown name is an error that offers the nearest right one. Names that Transformers and TRL had, or have for what lohan does
in another way, are understood with a warning. YAML is read by the safe loader, without aliases, up to a limit of size.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lohan.errors import OptionError
from lohan.train.config import TrainingConfig

MAX_YAML_BYTES = 2**17
FIELDS: dict[str, Field[Any]] = {field.name: field for field in fields(TrainingConfig)}
Warn = Callable[[str], None]

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "model_max_length": "max_length",
    "warmup_ratio": "warmup_steps",
    "train_batch_size": "per_device_train_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "torch_dtype": "dtype",
}
"""old name -> name"""
OLD_VALUES = {
    "optim": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"},
    "dtype": {"bfloat16": "bf16", "float32": "fp32"},
}
"""name -> old value -> value"""
REPLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("dtype", {"true": "bf16", "false": "fp32"}),
    "fp16": ("dtype", {"false": None}),
    "use_cpu": ("device", {"true": "cpu", "false": None}),
    "no_cuda": ("device", {"true": "cpu", "false": None}),
    "save_strategy": ("save_steps", {"false": 0, "no": 0, "steps": None}),
}
"""old name -> name, and for each old value that can be had the value; None: the default"""
NEEDLESS = {
    "gradient_checkpointing": "layers are recomputed in the backward pass anyway",
    "bf16_full_eval": "evaluation computes in dtype",
    "save_safetensors": "nothing else is ever written",
    "dataloader_num_workers": "data is read from a memory-mapped cache",
    "remove_unused_columns": "columns are recognised by their names",
    "overwrite_output_dir": "a run continues; remove its folder to start over",
    "logging_dir": "logs are in output_dir",
}
"""name -> why there is nothing to set here"""


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def parse_arguments(arguments: Sequence[str], warn: Warn = _warn) -> TrainingConfig:
    """`[config.yaml] --name value ...`. Also --name=value; a list is its flag several times; true need not be written."""
    in_files: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            in_files |= read_yaml(Path(word))
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        is_last = not rest or rest[0].startswith("--")
        if not equals:
            if not _is_known(name):
                raise _unknown(name, None if is_last else rest[0])
            if is_last and not _is_switch(name):
                raise OptionError(name, None, "its value is missing", f"Write --{name} VALUE")
            is_alone = is_last or (_is_switch(name) and rest[0].endswith((".yaml", ".yml")))
            value = "true" if is_alone else rest.pop(0)
        if name == "config":
            in_files |= read_yaml(Path(value))
        elif name in FIELDS and FIELDS[name].type == "Sequence[str]":
            flags.setdefault(name, []).append(value)
        elif name in flags:
            raise OptionError(name, value, f"it was given as {flags[name]!r} before", "Give it once")
        else:
            flags[name] = value
    return _config(translate(in_files, warn) | translate(flags, warn))


def from_dict(values: Mapping[str, Any], warn: Warn = _warn) -> TrainingConfig:
    """The config with these values by name, old names included."""
    return _config(translate(values, warn))


def _config(values: dict[str, Any]) -> TrainingConfig:
    if values.get("output_dir") is None:
        raise OptionError("output_dir", None, "a run needs a folder of its own", "Set it, for example to runs/first")
    return TrainingConfig(**values)


# -------------------------------------------------------------------- names


def _is_switch(name: str) -> bool:
    """Whether a flag of this name stands for true without a value."""
    return name in REPLACED or name in NEEDLESS or (name in FIELDS and str(FIELDS[name].type).startswith("bool"))


def _is_known(name: str) -> bool:
    return any(name in names for names in (FIELDS, RENAMED, REPLACED, NEEDLESS, ("config",)))


def _unknown(name: str, value: object) -> OptionError:
    known = [*FIELDS, *RENAMED, *REPLACED, *NEEDLESS]
    near = get_close_matches(name, known, 1, cutoff=0.5)
    remedy = f"Did you mean {near[0]}?" if near else "lohan train --help lists all"
    return OptionError(name, value, "there is no such option", remedy)


def translate(values: Mapping[str, Any], warn: Warn) -> dict[str, Any]:
    """Values by the names of today."""
    known: dict[str, Any] = {}
    for name, value in values.items():
        if not _is_known(name):
            raise _unknown(name, value)
        if name in NEEDLESS:
            warn(f"{name} has no effect: {NEEDLESS[name]}")
            continue
        new_name, new_value = _replaced(name, value, warn) if name in REPLACED else _renamed(name, value, warn)
        if new_name in known or (new_name != name and new_name in values):
            raise OptionError(name, value, f"{new_name}, which is the same, is set as well", f"Set {new_name} only")
        if name not in REPLACED or new_value is not None:
            known[new_name] = new_value
    return known


def _renamed(name: str, value: Any, warn: Warn) -> tuple[str, Any]:
    new_name = RENAMED.get(name, name)
    if new_name != name:
        warn(f"{name} is called {new_name} now")
    old_values = OLD_VALUES.get(new_name, {})
    if isinstance(value, str) and value in old_values:
        warn(f"{new_name} {value} is called {old_values[value]} here")
        value = old_values[value]
    return new_name, value


def _replaced(name: str, value: Any, warn: Warn) -> tuple[str, Any]:
    new_name, new_values = REPLACED[name]
    if (meant := str(value).lower()) not in new_values:
        raise OptionError(name, value, "lohan has no such thing", f"Leave it out, and set {new_name} (lohan train --help)")
    warn(f"{name} is set with {new_name} now")
    return new_name, new_values[meant]


# -------------------------------------------------------------------- YAML


def read_yaml(path: Path) -> dict[str, Any]:
    """The values of a YAML file, by name."""
    import yaml

    def refuse(reason: str, remedy: str = "Write one `name: value` a line, as docs/train.md shows") -> OptionError:
        return OptionError("config", str(path), reason, remedy)

    class Loader(yaml.SafeLoader):
        """No aliases, which can grow without limit, and no key twice, of which one would be lost."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise refuse(f"line {self.line + 1} has an alias", "Write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, num in keys.items() if num > 1]:
                raise refuse(f"{twice[0]} is set twice", "Set it once")
            return super().construct_mapping(node, deep)

    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise refuse(f"it has more than {MAX_YAML_BYTES} bytes", "Name a file of settings, not of data")
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror})", "Name a YAML file; options begin with --") from error
    except UnicodeDecodeError as error:
        raise refuse("it is not a text in UTF-8") from error
    except OptionError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refuse(f"it is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise refuse("it does not hold names and values")
    return values
