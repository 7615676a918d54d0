"""Saving: the dtype asked for, from masters or from any model, and never a folder that is half one model and half another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lohan.errors import ModelError
from lohan.model.load import open_model
from lohan.model.weights_out import cast, export
from tests.checkpoints import same_bits, saved, taken, tensors_of
from tests.tiny import CAUSAL, Perceptrons, causal_model, t5_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "phi"])
def test_round_trip_from_the_master(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tmp_path / "in", name, dtype)
    opened = open_model(tmp_path / "in", dtype=torch.bfloat16)
    assert opened.source_dtype == dtype
    master = {name: tensor.float() for name, tensor in taken(opened).items()}
    export(opened, master.__getitem__, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_another_dtype_is_written_and_declared(tmp_path: Path) -> None:
    model = saved(tmp_path / "in", "mixtral", torch.float32)
    opened = open_model(tmp_path / "in")
    export(opened, taken(opened).__getitem__, tmp_path / "out", dtype=torch.bfloat16)
    expected = {name: cast(tensor, torch.bfloat16) for name, tensor in tensors_of(tmp_path / "in").items()}
    assert same_bits(tensors_of(tmp_path / "out"), expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    assert model.dtype == torch.float32


def test_a_model_in_memory_is_its_own_source(tmp_path: Path) -> None:
    for name, model in {"mixtral": causal_model("mixtral", torch.bfloat16), "t5": t5_model()}.items():
        opened = open_model(model)
        weights = taken(opened)
        assert same_bits(weights, dict(model.named_parameters()))
        export(opened, weights.__getitem__, tmp_path / name, max_shard_bytes=60_000)
        model.save_pretrained(tmp_path / f"{name}-by-transformers")
        assert same_bits(tensors_of(tmp_path / name), tensors_of(tmp_path / f"{name}-by-transformers"))
        again = type(model).from_pretrained(tmp_path / name)
        assert same_bits(dict(again.named_parameters()), dict(model.named_parameters()))


def test_any_module_is_a_model(tmp_path: Path) -> None:
    model = Perceptrons()
    opened = open_model(model)
    export(opened, taken(opened).__getitem__, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert same_bits(tensors_of(tmp_path), dict(model.state_dict()))


def test_a_configuration_gives_random_weights() -> None:
    opened = open_model(CAUSAL["llama"](), dtype=torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 and tensor.std() >= 0 for _, tensor in opened.values())


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    saved(tmp_path / "in", "llama")
    opened = open_model(tmp_path / "in")
    weights = taken(opened)
    export(opened, weights.__getitem__, tmp_path / "out", max_shard_bytes=30_000)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def failing(name: str) -> Tensor:
        if name == "model.norm.weight":
            raise KeyError(name)
        return weights[name] * 2

    with pytest.raises(KeyError):
        export(opened, failing, tmp_path / "out", max_shard_bytes=30_000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_save_that_stops_half_way_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files have been given the names of others already, no index may claim that they belong together."""
    saved(tmp_path / "in", "llama")
    opened = open_model(tmp_path / "in")
    weights = taken(opened)
    export(opened, weights.__getitem__, tmp_path / "out", max_shard_bytes=30_000)
    rename, renamed = Path.replace, []

    def stopping(path: Path, target: Path) -> Path:
        renamed.append(path)
        if len(renamed) > 1:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", stopping)
        export(opened, lambda name: weights[name] * 2, tmp_path / "out", max_shard_bytes=30_000)
    with pytest.raises(ModelError, match="neither"):
        open_model(tmp_path / "out")


def test_saving_over_another_model_leaves_nothing_of_it(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    opened = open_model(tmp_path)
    weights = {name: tensor * 2 for name, tensor in taken(opened).items()}
    for limit in (60_000, 30_000, 10**9, 60_000):
        export(opened, weights.__getitem__, tmp_path, max_shard_bytes=limit)
        assert same_bits(tensors_of(tmp_path), weights)
        assert same_bits(taken(open_model(tmp_path)), weights)


def test_masters_are_rounded_half_up() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F807FFF, 0xBF808000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00008000, 0x80000000]
    expected = [0x3F81, 0x3F82, 0x3F80, 0xBF81, 0x7F80, 0x7F80, 0xFF80, 0x0001, 0x8000]
    master = torch.tensor(bits, dtype=torch.uint32).view(torch.float32)
    assert cast(master, torch.bfloat16).view(torch.uint16).tolist() == expected
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7FC00000], dtype=torch.uint32).view(torch.float32)
    assert cast(nans, torch.bfloat16).isnan().all()
