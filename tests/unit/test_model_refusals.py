"""What cannot be trained, or is not safe to read, is refused before any weight is read, with the name and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lohan.errors import ModelError
from lohan.model import safetensors_file
from lohan.model.load import open_model
from lohan.model.safetensors_file import TensorSpec, lay_out_file, read_header
from tests.tiny import causal_model

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama in one file, below a folder that belongs to somebody else."""
    causal_model("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def index(folder: Path, shard: object) -> None:
    """Make the folder a sharded one whose index puts everything into `shard`."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))


def elsewhere(folder: Path) -> None:
    """Move the weights out of the folder and leave a link."""
    (folder / "model.safetensors").rename(folder.parent / "weights.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "weights.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "quantised": (lambda f: configure(f, quantization_config={"quant_method": "mxfp4"}), "mxfp4"),
    "quantised-text": (lambda f: configure(f, text_config={"quantization_config": {"quant_method": "fp8"}}), "fp8"),
    "remote-code": (
        lambda f: configure(f, model_type="own", auto_map={"AutoConfig": "own.Own"}),
        "code that comes with the model",
    ),
    "unknown": (lambda f: configure(f, model_type="llama-99"), "unknown to Transformers"),
    "not-causal": (lambda f: configure(f, model_type="vit"), "no causal language model"),
    "no-config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "broken-config": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickles"),
    "fp8": (
        lambda f: change(f, lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.float8_e4m3fn)})),
        f"{WEIGHT} is stored as F8_E4M3",
    ),
    "int8": (lambda f: change(f, lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.int8)})), f"{WEIGHT} is stored as torch.int8"),
    "missing": (lambda f: change(f, lambda t: t.pop(WEIGHT)), f"missing: {WEIGHT}"),
    "unexpected": (lambda f: change(f, lambda t: t.update({"model.extra": torch.ones(2)})), "unexpected: model.extra"),
    "shape": (lambda f: change(f, lambda t: t.update({WEIGHT: t[WEIGHT].T.contiguous()})), f"{WEIGHT} in the model has"),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]), "cut off"),
    "shard-outside": (lambda f: index(f, "../model.safetensors"), "plain name"),
    "shard-no-name": (lambda f: index(f, 3), "plain name"),
    "shard-lost": (lambda f: index(f, "model-00002-of-00002.safetensors"), "weight file is missing"),
    "link": (elsewhere, "outside the model's folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, folder: Path) -> None:
    open_model(folder)
    damage, reason = REFUSED[name]
    damage(folder)
    with pytest.raises(ModelError) as refusal:
        open_model(folder)
    assert reason in str(refusal.value)


def test_an_index_that_names_a_tensor_which_is_nowhere(folder: Path) -> None:
    index(folder, "model-00001-of-00001.safetensors")
    open_model(folder)
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace(WEIGHT, "model.other"))
    with pytest.raises(ModelError, match=r"model\.other is in model-00001"):
        open_model(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    index(folder, "model-00001-of-00001.safetensors")
    save_file({WEIGHT: torch.ones(2)}, folder / "second.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"] | {WEIGHT: "second.safetensors"}}))
    with pytest.raises(ModelError, match="is in two files"):
        open_model(folder)


def test_links_into_the_hub_cache_are_followed(folder: Path) -> None:
    """The hub keeps files as `blobs/<hash>`, and `snapshots/<revision>` as links to them."""
    repository = folder.parent / "models--someone--tiny"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "blobs").mkdir()
    snapshot = folder.rename(repository / "snapshots" / "0123")
    (snapshot / "model.safetensors").rename(repository / "blobs" / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4567")
    assert open_model(snapshot).source_dtype == torch.bfloat16


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="/no/such/model: there is no such folder"):
        open_model("/no/such/model")


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ModelError, match="2 parameters, weight first, have no weights in memory"):
        open_model(model)


def header_file(path: Path, text: str, data: bytes = b"") -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
    return path


TENSOR = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
MALFORMED = {
    "twice": ("{" + TENSOR + "," + TENSOR + "}", "names a more than once"),
    "not-json": ("{" + TENSOR, "not valid JSON"),
    "not-an-object": ("[]", "not a JSON object"),
    "no-offsets": ('{"a":{"dtype":"F32","shape":[2]}}', "describes a by"),
    "wrong-size": ('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "does not fill its bytes"),
    "negative": ('{"a":{"dtype":"F32","shape":[-2],"data_offsets":[8,0]}}', "does not fill its bytes"),
    "overlap": ("{" + TENSOR + ',"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "b starts at byte"),
    "hole": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "a starts at byte"),
    "too-short": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "the tensors end at byte"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers(name: str, tmp_path: Path) -> None:
    read_header(header_file(tmp_path / "good", "{" + TENSOR + "}", bytes(8)))
    text, reason = MALFORMED[name]
    with pytest.raises(ModelError, match=reason):
        read_header(header_file(tmp_path / "bad", text, bytes(8)))


def test_headers_longer_than_the_file_or_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="cannot hold a header"):
        read_header(tmp_path / "short")
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 32)
    with pytest.raises(ModelError, match="longer than the 32"):
        read_header(header_file(tmp_path / "long", "{" + TENSOR + "}", bytes(8)))


def test_headers_that_lohan_writes_are_read_by_everybody(tmp_path: Path) -> None:
    specs = [
        TensorSpec("odd", torch.bfloat16, (3,)),
        TensorSpec("wide", torch.float32, (2, 2)),
        TensorSpec("none", torch.int64, (0,)),
    ]
    header, offsets, num_bytes = lay_out_file(specs)
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(num_bytes - len(header)))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in load_file(path).items()} == {
        s.name: (s.dtype, s.shape) for s in specs
    }
    assert {name: entry.offset for name, entry in read_header(path).items()} == offsets
    assert all(offsets[spec.name] % spec.dtype.itemsize == 0 for spec in specs)
