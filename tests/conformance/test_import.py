"""What an engine holds when it opens is its source, to the bit: any dtype, any placement, however small the pieces."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan import Engine
from lohan.config import Numerics
from lohan.errors import ModelError, StoreError
from lohan.keep import manifest
from lohan.keep.manifest import Piece
from lohan.model.file_reader import FileReader
from lohan.model.load import open_model
from lohan.model.safetensors_file import Entry
from lohan.model.shape import ModelShape
from lohan.model.units import discover
from lohan.model.weights_in import ModuleTensors
from lohan.run import importer
from lohan.run.places import layout_of
from lohan.schedule.slots import Sizes
from tests.checkpoints import same_bits, saved
from tests.tiny import causal_model

BATCH = {"input_ids": torch.arange(14).view(2, 7), "labels": torch.arange(14).view(2, 7)}


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as a unit's padding allows, so that a tensor lies in several and a piece has several."""
    for module in (manifest, importer):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 4096)


def masters(engine: Engine) -> dict[str, Tensor]:
    return {name: engine.read_parameter(name) for name, _ in engine.model.named_parameters()}


def opened(source: Path | nn.Module, folder: Path, placement: str = "auto", **settings: Any) -> Engine:
    ssd = folder / "ssd" if placement == "auto" else None
    return Engine(source, ssd=ssd, host_memory="256MiB", placement=placement, device="cpu", room_for=BATCH, **settings)


@pytest.mark.parametrize("name", ["mixtral", "llama-tied"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16])
def test_masters_are_what_is_stored(
    name: str, dtype: str, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    model = saved(tmp_path / "in", name, stored, intermediate_size=200)
    expected = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    for placement in ("auto", "memory"):
        with opened(tmp_path / "in", tmp_path, placement, dtype=dtype) as engine:
            assert max(unit.elements for unit in engine.shape.units) > 2 * 4096
            assert same_bits(masters(engine), expected)


def test_an_embedding_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    model = saved(tmp_path / "in", "llama", vocab_size=3000)
    expected = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    with opened(tmp_path / "in", tmp_path) as engine:
        assert sum("embed" in unit.name for unit in engine.shape.units) > 2
        assert same_bits(masters(engine), expected)


def test_what_is_no_tensor_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tensors and behind them, whatever a lane moved before."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(importer, "NUM_LANES", 1)
    model = causal_model("qwen3", torch.bfloat16)
    units = [unit.shape for unit in discover(model).units]
    layout, run = layout_of(ModelShape(tuple(units), ()), Sizes(2, (2,))), Remembered()
    importer.import_weights(open_model(model).tensors, units, layout, Numerics(), run, lambda phase, done, total: None)
    for index, unit in enumerate(units):
        is_tensor = torch.zeros(unit.trainable_elements, dtype=torch.bool)
        for tensor in unit.tensors:
            is_tensor[tensor.offset : tensor.end] = True
        weights = torch.cat([data for piece, data in run.written if piece.unit == index]).view(torch.int16)
        assert weights[is_tensor].any() and not weights[~is_tensor].any()
    gaps = [b.offset - a.end for unit in units for a, b in pairwise(unit.tensors)]
    assert any(gaps) and all(piece.plane == importer.WEIGHTS for piece, _ in run.written)


class Remembered:
    """A run that keeps copies of what is written to it, in order."""

    def __init__(self) -> None:
        self.written: list[tuple[Piece, Tensor]] = []

    def submit_read(self, piece: Piece, into: Tensor) -> Remembered:
        raise NotImplementedError

    def submit_write(self, piece: Piece, data: Tensor) -> Remembered:
        self.written.append((piece, data.clone()))
        return self

    def wait(self) -> None:
        """It is there."""


@pytest.mark.parametrize("placement", ["auto", "memory"])
def test_frozen_weights_and_mixed_dtypes_in_one_unit(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module in memory, one matrix of which does not lie in one piece there."""
    small_pieces(monkeypatch)
    model = causal_model("llama", torch.float32, intermediate_size=200)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj" not in name)
        if "down_proj" in name:
            parameter.data = parameter.data.bfloat16()
        if "gate_proj" in name:
            parameter.data = parameter.data.T.contiguous().T
    expected = {n: p.detach().float() if p.requires_grad else p.detach().bfloat16() for n, p in model.named_parameters()}
    with opened(model, tmp_path, placement) as engine:
        assert same_bits(masters(engine), expected)


def test_progress_counts_units(tmp_path: Path) -> None:
    saved(tmp_path / "in", "llama")
    told: list[tuple[int, int | None]] = []
    with opened(
        tmp_path / "in", tmp_path, progress=lambda phase, done, of: told.append((done, of)) if "import" in phase else None
    ):
        pass
    assert told == sorted(told) and told[0][0] == 0 and told[-1][0] == told[-1][1]


@pytest.mark.parametrize("placement", ["auto", "memory"])
def test_a_file_that_shrinks_meanwhile(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is closed, no thread is left, and the folder may be used again."""
    saved(tmp_path / "in", "llama")
    read = FileReader.read

    def shrunk(self: FileReader, entry: Entry, into: Tensor, skip_bytes: int = 0) -> None:
        if "layers.1" in entry.name:
            raise StoreError("read", str(entry.path), entry.offset, len(into), 0, None, "the file ends here")
        read(self, entry, into, skip_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(FileReader, "read", shrunk)
        with pytest.raises(StoreError, match="the file ends here"):
            opened(tmp_path / "in", tmp_path, placement)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lohan import")]
    opened(tmp_path / "in", tmp_path, placement).close()


def test_a_source_without_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_model("llama")
    names = {name: parameter.dtype for name, parameter in model.named_parameters() if "layers.1.mlp" not in name}
    monkeypatch.setattr(ModuleTensors, "dtypes", names)
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.down_proj\.weight, "):
        opened(model, tmp_path)
