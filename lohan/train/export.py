"""`lohan export SOURCE OUT`: a model as safetensors that Transformers loads, verified.

SOURCE is a run's output_dir, whether its run has ended or was interrupted: then the model is taken from the store, as its last
committed step left it. Or it is any model's folder, which is written anew (in another dtype, or in files of another size).

What was written is read back whole: every tensor of the model is there, in its shape, and finite.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lohan.config import parse_bytes, parse_dtype
from lohan.errors import ModelError, OptionError
from lohan.train.arguments import from_dict, read_yaml
from lohan.train.config import TrainingConfig
from lohan.train.console import Console
from lohan.train.generate import model_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEFAULT_SHARD = "5GB"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    source, out = Path(options.source), Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError("OUT", str(out), "it is there already", "Name a folder that does not exist yet")
    max_shard_bytes = parse_bytes("max_shard_size", options.max_shard_size)
    dtype_name = None if options.dtype is None else parse_dtype(options.dtype).value
    with Console() as console:
        console.phase("import libraries")
        import torch

        dtype = None if dtype_name is None else {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
        if (source / "config.yaml").is_file() and has_store(source):
            what = export_run(source, out, dtype, max_shard_bytes, console)
        else:
            what = export_folder(model_folder(source), out, dtype, max_shard_bytes, console)
        num_tensors, num_bytes = verify(out, console)
        console.idle()
        console.line(f"{out}: {what}, {num_tensors} tensors, {num_bytes / 1e9:.2f} GB, all read back")
    return 0


def has_store(output_dir: Path) -> bool:
    """Whether a run's state is on its drives."""
    drives = config_of(output_dir).drives
    return bool(drives) and all(drive.is_dir() and any(drive.iterdir()) for drive in drives)


def export_run(output_dir: Path, out: Path, dtype: torch.dtype | None, max_shard_bytes: int, console: Console) -> str:
    """The model of a store."""
    from lohan.host.memory import available_bytes
    from lohan.train.checks import check_model, open_tokenizer
    from lohan.train.inputs import use_template
    from lohan.train.trainer import open_engine

    config = config_of(output_dir)
    if config.model_name_or_path is None:
        reason = "its run was given a module, without which its store cannot be read"
        raise OptionError("SOURCE", str(output_dir), reason, "Continue it from Python to its end: it then saves its model")
    console.phase("open store")
    folder, _ = check_model(config.model_name_or_path)
    with open_engine(config, folder, available_bytes() // 2, console) as engine:
        console.phase(f"write {out}")
        engine.save_pretrained(out, dtype=dtype, max_shard_bytes=max_shard_bytes)
        if config.chat_template_path is not None and (tokenizer := open_tokenizer(folder)) is not None:
            use_template(config, tokenizer).save_pretrained(out)
        return f"the model after step {engine.num_steps}"


def export_folder(folder: Path, out: Path, dtype: torch.dtype | None, max_shard_bytes: int, console: Console) -> str:
    """A model's folder, written anew."""
    from lohan.model.load import open_model
    from lohan.model.weights_out import export

    console.phase(f"open {folder}")
    opened = open_model(folder)
    console.phase(f"write {out}")
    export(opened, _InOrder(opened.values()), out, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return f"the model of {folder}"


class _InOrder:
    """Tensors by name, from a source that gives them in about that order."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors, self._early = iter(tensors), dict[str, "Tensor"]()

    def __call__(self, wanted: str) -> Tensor:
        while wanted not in self._early:
            name, tensor = next(self._tensors)
            self._early[name] = tensor
        return self._early.pop(wanted)


def verify(folder: Path, console: Console) -> tuple[int, int]:
    """Tensors and bytes of a folder that loads: names and shapes are those of the model, and every value is finite."""
    from lohan.model.load import open_model

    num_tensors = num_bytes = 0
    opened = open_model(folder)
    for name, tensor in opened.values():
        num_tensors, num_bytes = num_tensors + 1, num_bytes + tensor.nbytes
        console.progress("verify", num_tensors, len(opened.stored))
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{folder}: {name} was written, but has values that are not finite")
    return num_tensors, num_bytes


def config_of(output_dir: Path) -> TrainingConfig:
    """What a run was set to."""
    return from_dict(read_yaml(output_dir / "config.yaml"))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lohan export", description="Write a model as safetensors.", allow_abbrev=False)
    parser.add_argument("source", help="a run's output_dir, or a model's folder")
    parser.add_argument("out", help="a folder that does not exist yet")
    parser.add_argument("--dtype", help="bf16 or fp32; else each tensor as the model that was trained had it")
    parser.add_argument("--max_shard_size", default=DEFAULT_SHARD, help=f"the most that one file holds ({DEFAULT_SHARD})")
    return parser
