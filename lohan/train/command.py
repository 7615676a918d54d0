"""`lohan train [config.yaml] [--name value ...]`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import MISSING

from lohan.train import config as config_module
from lohan.train.arguments import FIELDS, parse_arguments
from lohan.train.config import TrainingConfig
from lohan.train.console import Console
from lohan.train.interrupts import EXIT_INTERRUPTED

USAGE = """usage: lohan train [CONFIG.yaml] [--NAME VALUE ...]

Fine-tunes a model. Names are the same in the file and as flags; flags win. A list is its flag several times; a flag that is
true or false needs no value for true. The same command continues a run that was interrupted.

    lohan train --model_name_or_path my-model --dataset_name chats.jsonl --output_dir runs/first
"""


def main(arguments: Sequence[str]) -> int:
    if any(word in ("-h", "--help") for word in arguments):
        print(help_text())
        return 0
    warnings: list[str] = []
    config = parse_arguments(arguments, warnings.append)
    with Console() as console:
        for text in warnings:
            console.warn(text)
        console.phase("import libraries")
        from lohan.train.trainer import Trainer

        summary = Trainer(args=config, console=console).train()
    return EXIT_INTERRUPTED if summary.interrupted else 0


def help_text() -> str:
    """Every option with its meaning, which is the text below its field, and its default."""
    about = field_docs()
    lines = [USAGE]
    for name, field in FIELDS.items():
        kind = str(field.type).replace("Sequence[str]", "text, several times").replace("str", "text").replace(" | None", "")
        default = "required" if field.default is MISSING else "none" if field.default in (None, ()) else f"{field.default}"
        lines.append(
            f"  --{name}  ({kind.lower()}; {default.lower() if field.type == 'bool' else default})\n        {about[name]}"
        )
    return "\n".join(lines)


def field_docs() -> dict[str, str]:
    """The text below each field of TrainingConfig."""
    tree = ast.parse(inspect.getsource(config_module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == TrainingConfig.__name__)
    docs = {}
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs
