"""docs/data.md shows rows and what becomes of them: here they become that, and its program runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from lohan.data import DataSettings, open_rows, show_masked, tokenize
from lohan.data.files import KINDS
from lohan.data.settings import TOO_LONG
from tests.tiny_tokenizer import PLAIN, tiny_tokenizer

GUIDE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SHOWN = re.findall(r"```jsonl\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
PROGRAM = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize(("row", "shown"), SHOWN)
def test_rows_become_what_is_shown(tmp_path: Path, row: str, shown: str) -> None:
    (tmp_path / "data.jsonl").write_text(row)
    tokenizer = tiny_tokenizer(PLAIN)
    dataset = tokenize(open_rows(tmp_path), tokenizer, DataSettings(), tmp_path / "tokens")
    assert show_masked(dataset[0], tokenizer, color=False).partition("\n")[2] == shown.rstrip("\n")


def test_everything_is_in_the_guide() -> None:
    assert len(SHOWN) == 7 and GUIDE.count("```jsonl") == 7
    for word in (*KINDS, *TOO_LONG, "completion_only_loss", "assistant_only_loss", "group_by_length", "packing"):
        assert f"`{word}`" in GUIDE


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer(PLAIN).save_pretrained("my-model")
    Path("chats.jsonl").write_text("\n".join(json.dumps({"prompt": "hello", "completion": str(at)}) for at in range(100)))
    assert PROGRAM
    names: dict[str, list[dict[str, torch.Tensor]]] = {}
    exec(PROGRAM[1], names)
    assert set(names["batches"][0]) == {"input_ids", "labels", "position_ids"}
