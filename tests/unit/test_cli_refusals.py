"""Bad input to `lohan train`: refused with option, value and remedy, exit code 2; nothing is written, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lohan import Engine
from lohan.cli import main
from lohan.report import StepReport
from tests.tiny import causal_model
from tests.unit.training import SETTINGS, chats, make_model, on_a_drive, steps_of, write_jsonl


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
    "pickled weights": (pickled, ("model_name_or_path=", "pytorch_model.bin", "does not read pickles", "Name a folder")),
    "missing weights": (without_weights, ("model_name_or_path=", "neither model.safetensors nor", "Name a folder")),
    "missing model": (
        flags("--model_name_or_path=PLACE/nowhere"),
        ("model_name_or_path=", "nowhere", "there is no such folder", "Name a folder"),
    ),
    "code in the model": (code_in_the_model, ("model_name_or_path=", "needs code that comes with the model", "Name a folder")),
    "unknown flag": (flags("--learning_rat=1"), ("learning_rat='1'", "Did you mean learning_rate?")),
    "no number": (flags("--learning_rate=fast"), ("learning_rate='fast'", "it has to be a number")),
    "malformed row": (malformed_row, ("dataset_name=", "data.jsonl", "line 3", "Mend")),
    "missing data": (flags("--dataset_name=PLACE/none.jsonl"), ("none.jsonl", "no such file", "Check the path")),
    "unknown columns": (unknown_columns, ("dataset_name=", "mesages", "Did you mean 'messages'")),
    "too long": (flags("--max_length=65"), ("max_length=65", "positions for 64 tokens", "Set it to 64 or less")),
    "too long a row": (flags("--max_length=8", "--too_long=error"), ("max_length=8", "line 1", "tokens")),
    "tokenizer that does not fit": (too_few_embeddings, ("model_name_or_path=", "vocabulary", "200", "Use the tokenizer")),
    "no tokenizer": (no_tokenizer, ("model_name_or_path=", "there is no tokenizer with it", "Put the files")),
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
    assert re.match(r"lohan train: error: \w+=.+?: .+[.?] [A-Z].+\n", error), "option, value, reason, remedy"
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


def test_a_folder_that_may_not_be_written_to_is_named(place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By somebody who is not root, to whom everything may be written."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place / "locked")
    (place / "locked").mkdir()
    for option in ("ssd", "output_dir"):
        assert train(place, f"--{option}={place}/locked/store") == 2
        error = capsys.readouterr().err
        assert f"{option}='{place}/locked/store': {place}/locked is not a folder that you may write to. Name one" in error
    assert [*(place / "locked").iterdir()] == [] and not (place / "run").exists()


def test_a_filesystem_without_o_direct_is_named(place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuses(path: Any, mode: int, *rest: Any, **more: Any) -> int:
        if mode & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, mode, *rest, **more)

    monkeypatch.setattr(os, "open", refuses)
    assert train(place) == 2
    assert f"ssd='{place}/run/store': the filesystem there has no O_DIRECT. Name a folder on" in capsys.readouterr().err
    assert not (place / "run").exists()


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file but tokens, byte for byte."""
    files = [path for path in folder.rglob("*") if path.is_file() and "tokens" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--seed=7", ("the run there is another one", "seed")),
        ("--optim=sgd", ("the run there is another one", "optimizer")),
        ("--resume_from_checkpoint=false", ("a run is there, at step 2, and would be lost",)),
    ],
)
def test_the_store_of_another_run_is_refused_and_kept(flag: str, words: tuple[str, ...], place: Path, capsys: Any) -> None:
    assert train(place) == 0
    before = snapshot(place / "run")
    capsys.readouterr()
    assert train(place, flag) == 2
    error = capsys.readouterr().err
    assert [word for word in ("ssd=", *words, "name another folder") if word.lower() not in error.lower()] == [], error
    assert snapshot(place / "run") == before
    assert train(place) == 0, "the same run goes on"


def test_losses_that_are_not_finite_end_the_run_and_keep_its_model(
    place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning rate that is far too high, from step 2 on; the store goes on with a better one."""
    step = Engine.step

    def spoil(engine: Engine, batches: Any, **options: Any) -> StepReport:
        if engine.num_steps:
            options["loss_fn"] = lambda model, batch: model(**batch).loss * float("nan")
        return step(engine, batches, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", spoil)
        assert train(place, "--max_skipped_steps=2") == 2
    error = capsys.readouterr().err
    for words in ("max_skipped_steps=2", "2 steps in a row had a loss (nan)", "Lower learning_rate", "that of step 1"):
        assert words in error
    assert train(place, "--learning_rate=1e-4") == 0
    assert [line["step"] for line in steps_of(place / "run")] == [1, 1, 1, 2]
