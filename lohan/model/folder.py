"""A folder that holds a model: its configuration, weight files and tokenizer, found and checked before anything is read.

Refused here, with the reason: quantised weights, code that comes with the model, pickles, and weight files outside the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from lohan.errors import LohanError, ModelError
from lohan.model.json_file import read_object
from lohan.model.safetensors_file import Entry, read_header

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SIDE_FILES = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "processor_config.json",
    "preprocessor_config.json",
)
"""what belongs to a model beside its weights; kept in memory, so that saving does not need the source"""
MAX_SIDE_BYTES = 256 * 2**20
MANY_LAYERS = 1000
"""more than any model has; some configurations count layers that their model does not have"""
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve(source: str | Path) -> Path:
    """The folder of a model: `source` itself, or where the hub's cache keeps the model of that name."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(source).startswith("."):
        raise ModelError(f"{source}: there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.safetensors", "*.safetensors.index.json", *SIDE_FILES]
        return Path(snapshot_download(str(source), allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"{source} is neither a folder nor a model that the hub gives out: {error}") from error


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a causal language model that Transformers has code for."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ModelError(f"{folder}: there is no {CONFIG_NAME}")
    fields = read_object(path)
    _refuse_quantised(path, fields)
    _refuse_kernels(path, fields)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        remote = "auto_map" in fields
        why = "needs code that comes with the model, which lohan does not run" if remote else "is unknown to Transformers"
        raise ModelError(f"{path}: model_type {kind!r} {why}")
    with sensible(path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{path}: model_type {kind!r} has no causal language model in Transformers")
    return config


@contextmanager
def sensible(path: Path) -> Iterator[None]:
    """What Transformers makes of a configuration: whatever it raises is told as what is wrong with the file."""
    try:
        yield
    except LohanError:
        raise
    except (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ModelError(f"{path}: no model can be made from it ({type(error).__name__}: {said:.500})") from error


def _refuse_quantised(path: Path, fields: dict[str, Any]) -> None:
    text_config = fields.get("text_config")
    quantised = fields.get("quantization_config") or (isinstance(text_config, dict) and text_config.get("quantization_config"))
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ModelError(f"{path}: quantised weights ({method}) cannot be trained. Use the bf16, fp16 or fp32 version")


def _refuse_kernels(path: Path, value: Any, name: str = "") -> None:
    """`attn_implementation: someone/kernel` makes Transformers fetch compiled code from the hub and run it."""
    inner = value.items() if isinstance(value, dict) else ((name, item) for item in value) if isinstance(value, list) else ()
    for key, item in inner:
        _refuse_kernels(path, item, name if "implementation" in name else key)
    if isinstance(value, str) and "implementation" in name and not value.replace("_", "").isalnum():
        raise ModelError(f"{path}: {name} {value!r} needs code from the hub, which lohan does not run. Remove {name} from it")


def check_layers(path: Path, fields: dict[str, Any], num_tensors: int) -> None:
    """A module of a billion layers takes all memory while it is made: each has at least one tensor in the files."""
    for name, value in fields.items():
        if isinstance(value, int) and "layer" in name and value > max(num_tensors, MANY_LAYERS):
            raise ModelError(f"{path}: {name} is {value}, but the weight files hold {num_tensors} tensors")
        if isinstance(value, dict):
            check_layers(path, value, num_tensors)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder's weight files by name."""
    if (folder / WEIGHTS_NAME).is_file():
        return read_header(_inside(folder, WEIGHTS_NAME))
    index = folder / INDEX_NAME
    if not index.is_file():
        pickles = [path.name for path in sorted(folder.iterdir()) if any(fnmatch(path.name, pattern) for pattern in PICKLES)]
        only = f", only {', '.join(pickles)}: lohan does not read pickles, convert them to safetensors" if pickles else ""
        raise ModelError(f"{folder}: there is neither {WEIGHTS_NAME} nor {INDEX_NAME}{only}")
    try:
        weight_map: dict[str, str] = read_object(index)["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of weight files: {error!r}") from error
    entries: dict[str, Entry] = {}
    for shard in shards:
        for name, entry in read_header(_inside(folder, shard)).items():
            if name in entries:
                raise ModelError(f"{name} is in two files: {entries[name].path} and {entry.path}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].path.name != shard:
            raise ModelError(f"{index} says that {name} is in {shard}, but it is not there")
    return entries


def _inside(folder: Path, name: object) -> Path:
    """A weight file of the folder, by a plain name; links may lead to the hub cache's own blobs and nowhere else outside."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
        raise ModelError(f"{folder / INDEX_NAME}: {name!r} is not the plain name of a safetensors file")
    path = folder / name
    if not path.is_file():
        raise ModelError(f"{path}: the weight file is missing")
    _check_inside(folder, path)
    return path


def _check_inside(folder: Path, path: Path) -> None:
    """A link out of a folder that somebody made would let its files, when they are saved again, hold what is private here."""
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise ModelError(f"{path} is a link to {path.resolve()}, outside the model's folder")


def read_side_files(folder: Path) -> dict[str, bytes]:
    """The small files that make the weights a model."""
    paths = [p for p in sorted(folder.iterdir()) if p.is_file() and any(fnmatch(p.name, pattern) for pattern in SIDE_FILES)]
    for path in paths:
        _check_inside(folder, path)
        if (nbytes := path.stat().st_size) > MAX_SIDE_BYTES:
            raise ModelError(f"{path}: its {nbytes} bytes are more than the {MAX_SIDE_BYTES} that lohan reads of such a file")
    return {path.name: path.read_bytes() for path in paths}
