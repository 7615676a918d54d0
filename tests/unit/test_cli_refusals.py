"""Bad input to `lohan train`: refused with option, value and remedy, exit code 2, and neither a store nor a log."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lohan.cli import main
from tests.tiny import causal_model
from tests.unit.training import SETTINGS, chats, make_model, on_a_drive, write_jsonl


@pytest.fixture(scope="module")
def good() -> Iterator[Path]:
    with on_a_drive() as folder:
        make_model(folder / "model")
        write_jsonl(folder / "data.jsonl", chats(8))
        yield folder


@pytest.fixture
def place(good: Path) -> Iterator[Path]:
    """Input that works, to be spoilt."""
    with on_a_drive() as folder:
        shutil.copytree(good, folder, dirs_exist_ok=True)
        yield folder


def train(place: Path, *flags: str) -> int:
    settings = {
        "model_name_or_path": place / "model",
        "dataset_name": place / "data.jsonl",
        "output_dir": place / "run",
        "max_steps": 2,
        **SETTINGS,
    }
    given = {flag.partition("=")[0].removeprefix("--") for flag in flags}
    return main(["train", *(f"--{name}={value}" for name, value in settings.items() if name not in given), *flags])


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def pickled(place: Path) -> tuple[str, ...]:
    (place / "model" / "model.safetensors").rename(place / "model" / "pytorch_model.bin")
    return ()


def without_weights(place: Path) -> tuple[str, ...]:
    (place / "model" / "model.safetensors").unlink()
    return ()


def malformed_row(place: Path) -> tuple[str, ...]:
    lines = (place / "data.jsonl").read_text().splitlines()
    lines[2] = lines[2][:-3]
    (place / "data.jsonl").write_text("\n".join(lines))
    return ()


def unknown_columns(place: Path) -> tuple[str, ...]:
    write_jsonl(place / "data.jsonl", [{"mesages": []}])
    return ()


def too_few_embeddings(place: Path) -> tuple[str, ...]:
    model = causal_model("llama")
    model.resize_token_embeddings(200)
    model.save_pretrained(place / "model")
    return ()


def no_tokenizer(place: Path) -> tuple[str, ...]:
    for path in (place / "model").glob("*token*"):
        path.unlink()
    return ()


def code_in_the_model(place: Path) -> tuple[str, ...]:
    change_json(place / "model" / "config.json", model_type="own", auto_map={"AutoModelForCausalLM": "own.Own"})
    return ()


def drive_in_a_file(place: Path) -> tuple[str, ...]:
    (place / "file").write_text("")
    return (f"--ssd={place}/file/store",)


def flags(*words: str) -> Callable[[Path], tuple[str, ...]]:
    return lambda place: tuple(word.replace("PLACE", str(place)) for word in words)


REFUSED: dict[str, tuple[Callable[[Path], tuple[str, ...]], tuple[str, ...]]] = {
    "pickled weights": (pickled, ("pytorch_model.bin", "does not read pickles", "safetensors")),
    "missing weights": (without_weights, ("model.safetensors", "neither")),
    "missing model": (flags("--model_name_or_path=PLACE/nowhere"), ("nowhere", "no such folder")),
    "code in the model": (code_in_the_model, ("needs code that comes with the model",)),
    "unknown flag": (flags("--learning_rat=1"), ("learning_rat='1'", "Did you mean learning_rate?")),
    "no number": (flags("--learning_rate=fast"), ("learning_rate='fast'", "it has to be a number")),
    "malformed row": (malformed_row, ("data.jsonl", "line 3", "Mend")),
    "missing data": (flags("--dataset_name=PLACE/none.jsonl"), ("none.jsonl", "no such file", "Check the path")),
    "unknown columns": (unknown_columns, ("mesages", "Did you mean 'messages'")),
    "too long": (flags("--max_length=65"), ("max_length=65", "positions for 64 tokens", "Set it to 64 or less")),
    "too long a row": (flags("--max_length=8", "--too_long=error"), ("max_length=8", "line 1", "tokens")),
    "tokenizer that does not fit": (too_few_embeddings, ("vocabulary", "200", "Use the tokenizer")),
    "no tokenizer": (no_tokenizer, ("there is no tokenizer with it", "Put the files")),
    "missing drive": (flags("--ssd=PLACE/nowhere/store"), ("ssd=", "there is no folder", "mounted drive")),
    "drive in a file": (drive_in_a_file, ("ssd=", "there is no folder", "Name a folder")),
    "tmpfs": (flags("--ssd=/dev/shm/lohan-test"), ("ssd='/dev/shm/lohan-test'", "tmpfs", "Name a folder on an SSD")),
    "output_dir that is a file": (flags("--output_dir=PLACE/data.jsonl"), ("output_dir=", "it is a file", "Name a folder")),
    "tracker that is not installed": (flags("--report_to=trackio"), ("report_to='trackio'", "pip install trackio")),
    "evaluation without data": (flags("--eval_strategy=epoch"), ("eval_dataset_name=None", "no other split", "Name a file")),
    "missing template": (flags("--chat_template_path=PLACE/no.jinja"), ("chat_template_path=", "cannot be read")),
}
"""what is spoilt, and words of the message"""


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str, place: Path, capsys: Any) -> None:
    spoil, words = REFUSED[case]
    flags = spoil(place)
    before = sorted(path for path in place.rglob("*") if "tokens" not in path.parts)
    capsys.readouterr()
    assert train(place, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("lohan train: error: ") and "Traceback" not in error
    assert [word for word in words if word not in error] == [], error
    written = [path for path in place.rglob("*") if path not in before and not path.is_relative_to(place / "run" / "tokens")]
    assert written in ([], [place / "run"])
    assert not Path("/dev/shm/lohan-test").exists()


def test_a_budget_too_small_tells_the_smallest_that_works(place: Path, capsys: Any) -> None:
    assert train(place, "--host_memory=100KiB") == 2
    error = capsys.readouterr().err
    smallest = error.partition("The smallest host_memory that works here is ")[2].split()[0]
    assert "host_memory=102400" in error and smallest.endswith("MiB"), error
    assert [path.name for path in (place / "run").iterdir()] == ["tokens"]
    assert train(place, f"--host_memory={smallest}") == 0


def test_a_full_drive_tells_what_is_needed_and_free(place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Full)
    assert train(place) == 2
    error = capsys.readouterr().err
    assert "ssd=" in error and "4096 are free" in error and "Free space there" in error
    assert not (place / "run" / "log.jsonl").exists()
