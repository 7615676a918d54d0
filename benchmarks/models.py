"""The models and the tokens of all benchmarks: Llamas of the shapes that figures are given for, random, in bf16.

    python benchmarks/models.py 374m 1.1b           make their folders below .bench/models, where they are kept

A folder is made once, by a process of its own where memory is measured. `--models` names another place for them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BENCH_DIR = Path(__file__).resolve().parent.parent / ".bench"
VOCABULARY = 32000


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with an untied head."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int

    @property
    def folder_name(self) -> str:
        return f"llama-{self.num_layers}-{self.hidden}"


SHAPES = {
    "tiny": Shape(4, 256, 704, 4, 4),
    "374m": Shape(24, 1024, 2816, 16, 16),
    "396m-wide": Shape(6, 2048, 5632, 32, 4),
    "1.1b": Shape(22, 2048, 5632, 32, 4),
    "1.1b-half": Shape(11, 2048, 5632, 32, 4),
    "1.1b-double": Shape(44, 2048, 5632, 32, 4),
}


def add_folders(parser: argparse.ArgumentParser) -> None:
    """The options that say where a benchmark works."""
    parser.add_argument("--dir", type=Path, default=BENCH_DIR, help="a folder on the drive to measure (default: .bench)")
    parser.add_argument("--models", type=Path, default=BENCH_DIR / "models", help="where models are kept (.bench/models)")


def model_folder(name: str, models: Path) -> Path:
    """The folder of a shape's model, made if need be."""
    folder = models / SHAPES[name].folder_name
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, __file__, name, "--models", str(models)], check=True)
    return folder


def make_model(shape: Shape, folder: Path) -> None:
    """A pretrained folder, complete or not there; from seed 0 it has the weights that `deepspeed/train.py` builds."""
    import torch

    torch.manual_seed(0)
    partial = folder.with_name(folder.name + ".partial")
    _build(shape).save_pretrained(partial)
    partial.rename(folder)


def hollow_model(shape: Shape) -> PreTrainedModel:
    """A model whose weights nobody has written: it takes no memory."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return _build(shape)


def _build(shape: Shape) -> PreTrainedModel:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def make_tokens(batch: int, seq: int) -> list[list[int]]:
    """The same tokens for every system and run."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens: list[list[int]] = torch.randint(VOCABULARY, (batch, seq), generator=generator).tolist()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"one or more of {', '.join(SHAPES)}")
    parser.add_argument("--models", type=Path, default=BENCH_DIR / "models")
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)
    for name in options.shapes:
        folder = options.models / SHAPES[name].folder_name
        if not folder.exists():
            make_model(SHAPES[name], folder)
        print(f"{name}: {folder}")


if __name__ == "__main__":
    main()
