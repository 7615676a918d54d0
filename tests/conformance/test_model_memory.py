"""Models go in and out within the memory of their largest tensors, seen from the operating system in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from lohan.config import Numerics
from lohan.keep.manifest import PIECE_ELEMENTS, Piece
from lohan.model.file_reader import BLOCK_BYTES, REQUEST_BYTES
from lohan.model.keys import group_for_export, to_source_format
from lohan.model.load import OpenedModel, build_on_meta, open_model
from lohan.model.safetensors_file import TensorSpec, lay_out_file
from lohan.model.shape import ModelShape
from lohan.model.units import discover
from lohan.model.weights_out import export
from lohan.run.importer import NUM_LANES, import_weights
from lohan.run.places import layout_of
from lohan.schedule.slots import Sizes

ROOT = Path(__file__).parents[2]
MIB = 2**20
SLACK_BYTES = 24 * MIB
"""Python objects, and the allocator's thresholds"""
EXPERTS_BYTES = 8 * 2 * 1792 * 512 * 2
"""the largest tensor in the model: eight experts' gate and up projections"""


def write_zeros(folder: Path) -> int:
    """A Mixtral of 400 MB whose file is one hole, so that it costs no time to make; its size."""
    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_local_experts": 8, "num_hidden_layers": 9}
    config = AutoConfig.for_model("mixtral", vocab_size=8000, num_attention_heads=8, num_key_value_heads=2, **sizes)
    config.save_pretrained(folder)
    model = build_on_meta(config, torch.bfloat16)
    specs: list[TensorSpec] = []
    for names in group_for_export(model, dict(model.named_parameters())):
        source = to_source_format(model, {name: model.get_parameter(name).detach() for name in names})
        specs += [TensorSpec(name, torch.bfloat16, tuple(tensor.shape)) for name, tensor in source.items()]
    header, _, num_bytes = lay_out_file(specs)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(num_bytes)
    return num_bytes


def grown_by(work: str, folder: Path) -> int:
    """Bytes by which the resident memory of a process grew at most while it did `work` on the folder's model."""
    program = f"from tests.conformance.test_model_memory import {work}, measured; measured({work}, {str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def measured(work: Callable[[OpenedModel], None], folder: str) -> None:
    """In the child: open the model, do the work, print by how much the process grew."""
    torch.set_num_threads(1)
    opened = open_model(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = status("VmRSS")
    work(opened)
    print(status("VmHWM") - before)


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def read_all(opened: OpenedModel) -> None:
    for _, tensor in opened.values():
        assert not tensor[0].any()


def import_all(opened: OpenedModel) -> None:
    """With nowhere to go."""
    units = tuple(unit.shape for unit in discover(opened.model).units)
    layout = layout_of(ModelShape(units, ()), Sizes(2, (2,)))
    import_weights(opened.tensors, units, layout, Numerics(), Nowhere(), lambda phase, done, total: None)


class Nowhere:
    """A run that forgets what is written."""

    def submit_read(self, piece: Piece, into: Tensor) -> Nowhere:
        return self

    def submit_write(self, piece: Piece, data: Tensor) -> Nowhere:
        return self

    def wait(self) -> None: ...


def write_all(opened: OpenedModel) -> None:
    assert isinstance(opened.model, PreTrainedModel)
    folder = Path(str(opened.model.name_or_path))
    shapes = {name: parameter.shape for name, parameter in opened.model.named_parameters()}
    export(opened, lambda name: torch.ones(shapes[name], dtype=torch.bfloat16), folder / "out")


def test_importing_takes_a_few_pieces(tmp_path: Path) -> None:
    """Less than the largest tensor, here."""
    num_bytes = write_zeros(tmp_path)
    grown = grown_by("import_all", tmp_path)
    lane_bytes = PIECE_ELEMENTS * (2 + 2) + REQUEST_BYTES + BLOCK_BYTES
    assert grown < NUM_LANES * lane_bytes + SLACK_BYTES < num_bytes / 5


def test_reading_takes_three_largest_tensors(tmp_path: Path) -> None:
    """The one that is looked at, the next one, and what the consumer has not let go of yet."""
    num_bytes = write_zeros(tmp_path)
    grown = grown_by("read_all", tmp_path)
    assert EXPERTS_BYTES < grown < 3 * EXPERTS_BYTES + SLACK_BYTES < num_bytes / 2


def test_writing_takes_two_largest_tensors(tmp_path: Path) -> None:
    """As it is in the model, and as it is in the file."""
    num_bytes = write_zeros(tmp_path)
    grown = grown_by("write_all", tmp_path)
    assert EXPERTS_BYTES < grown < 2 * EXPERTS_BYTES + 16 * MIB + SLACK_BYTES < num_bytes / 2
    assert open_model(tmp_path / "out").source_dtype == torch.bfloat16
