"""Rows of every kind of source are the same rows, read a few at a time; what is wrong with one names file and place."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from lohan.data import Rows, open_rows
from lohan.data.json_stream import MalformedError, values
from lohan.errors import OptionError

ROWS = [{"text": f'row {number}: ä {{["\\\n'} for number in range(200)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".jsonl":
            path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".txt":
            path.write_text("\n \n".join(row["text"].replace("\n", "") for row in rows))
    return path


def contents(rows: Rows) -> list[Any]:
    return [dict(row.values) for row in rows.read()]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_of_a_file(tmp_path: Path, suffix: str) -> None:
    rows = open_rows(write(tmp_path / f"data{suffix}", ROWS))
    assert contents(rows) == ROWS == contents(rows)  # as often as needed
    positions = [row.position for row in rows.read()]
    assert positions == sorted(positions) and positions[-1] <= (rows.total or 0)


def test_a_line_of_text_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone \r\n\n  \ntwo".encode())
    rows = open_rows(str(tmp_path / "a.txt"))
    assert contents(rows) == [{"text": "one "}, {"text": "two"}]
    assert [row.where for row in rows.read()] == ["line 1", "line 4"]
    assert rows.is_text


def test_rows_of_objects() -> None:
    table = datasets.Dataset.from_list(ROWS)
    assert contents(open_rows(table)) == contents(open_rows(table.with_format("numpy"))) == ROWS
    assert contents(open_rows(ROWS)) == contents(open_rows(tuple(ROWS))) == ROWS
    assert contents(open_rows(table.to_iterable_dataset())) == ROWS
    assert contents(open_rows(datasets.DatasetDict(test=table), "test")) == ROWS
    with pytest.raises(OptionError, match="dataset_train_split='train'.*only test"):
        open_rows(datasets.DatasetDict(test=table))


def test_rows_that_datasets_saved(tmp_path: Path) -> None:
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "both")
    assert contents(open_rows(tmp_path / "both")) == ROWS


# ---------------------------------------------------------------- folders


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    for part in ("a.jsonl", "b.jsonl"):
        write(tmp_path / part, ROWS[:2])
    write(tmp_path / ".hidden" / "c.jsonl", ROWS)
    (tmp_path / "README.md").write_text("about")
    rows = open_rows(tmp_path)
    assert contents(rows) == ROWS[:2] * 2
    assert [row.where for row in rows.read()] == ["a.jsonl line 1", "a.jsonl line 3", "b.jsonl line 1", "b.jsonl line 3"]


def test_files_named_after_splits(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.jsonl", ROWS[:1])
    write(tmp_path / "train-00001-of-00002.jsonl", ROWS[1:2])
    write(tmp_path / "val" / "a.jsonl", ROWS[2:3])
    write(tmp_path / "trainings.jsonl", ROWS)  # named after nothing
    assert contents(open_rows(tmp_path)) == ROWS[:2]
    assert contents(open_rows(tmp_path, "validation")) == contents(open_rows(tmp_path, "dev")) == ROWS[2:3]
    with pytest.raises(OptionError, match="no split 'test', only train, validation"):
        open_rows(tmp_path, "test")


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no file that ends in .jsonl"):
        open_rows(tmp_path)
    write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(OptionError, match="no split 'test'"):
        open_rows(tmp_path, "test")
    write(tmp_path / "b.txt", ROWS)
    with pytest.raises(OptionError, match="several kinds .jsonl, text"):
        open_rows(tmp_path)


# ---------------------------------------------------------------- complaints


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', "a.jsonl'.*line 3: not JSON: Expecting value at column 9"),
        ("a.jsonl", b'{"text": "x"}\n["y"]\n', "line 2: an array, not an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2: not UTF-8 text"),
        ("a.json", b'[{"text": "x"},\n {"text": nix}]', "line 2: not JSON"),
        ("a.json", b'[{"text": "x"},\n {"text": "y"}', "line 2: expected ',', found 'the end of the file'"),
        ("a.json", b'[{"text": "x"},\n {"text": "y', "line 2: not JSON: Unterminated string"),
        ("a.json", b'[{"text": "x"}] 7', "line 1: there is more after the end"),
        ("a.json", b'[{"text": "x"},\n 7]', r"row 2 \(line 2\): a number, not an object"),
        ("a.json", b'"text"', "starts with '\"', not with an array"),
        ("a.json", b"[\xff", "not UTF-8 text"),
        ("a.parquet", b"PAR1 or not", "row|line 1: not readable as Parquet"),
        ("a.txt", b"a\n\xff", "line 2: not UTF-8 text"),
        ("a.csv", b"text\n", "'.csv' is no format|.csv is no format that is known. Known are .jsonl"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=complaint) as caught:
        contents(open_rows(tmp_path / name))
    assert caught.value.option == "dataset_name" and str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "a/b/c", Path("missing")])
def test_a_path_that_is_not_there(source: str | Path) -> None:
    with pytest.raises(OptionError, match="there is no such file or folder. Check the path"):
        open_rows(source)


def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, split: str) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub (LocalEntryNotFoundError)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(OptionError, match=r"dataset_name='some/data'.*ConnectionError: Couldn't reach.*check the name"):
        open_rows("some/data")


@pytest.mark.parametrize("source", [7, None, iter(ROWS)])
def test_objects_that_are_no_data(source: object) -> None:
    with pytest.raises(OptionError, match="train_dataset=.*no data that is known"):
        open_rows(source)


def test_a_list_of_something_else() -> None:
    with pytest.raises(OptionError, match="row 2: a string, not a dict"):
        contents(open_rows([{"text": "a"}, "b"]))


# ---------------------------------------------------------------- JSON as a stream

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Dribble(io.StringIO):
    """Gives so few characters at a time that every value is cut somewhere."""

    size = 1

    def read(self, size: int | None = -1) -> str:
        return super().read(self.size)


@given(rows=st.lists(JSON, max_size=5), size=st.integers(1, 7), indent=st.sampled_from([None, 1]))
def test_an_array_arrives_in_any_pieces(rows: list[Any], size: int, indent: int | None) -> None:
    for text in (json.dumps(rows, indent=indent), json.dumps({"version": 1.5, "data": rows, "more": [{}]}, indent=indent)):
        stream = Dribble(text)
        stream.size = size
        assert [value for _, value in values(stream)] == rows


def test_lines_of_objects_under_the_wrong_name() -> None:
    assert [value for _, value in values(io.StringIO('{"a": 1}\n{"b": {"data": [2]}}\n'))] == [{"a": 1}, {"b": {"data": [2]}}]


def test_rows_come_before_the_end_has_been_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_text(json.dumps([{"text": "x" * 1000}] * 4000))
    rows = open_rows(path)
    assert next(rows.read()).position < path.stat().st_size / 4


def test_an_early_mistake_is_found_early() -> None:
    """Not by reading all that follows in the hope that it mends it."""
    stream = io.StringIO('[{"a": oops},' + '{"a": 1},' * 400_000)
    with pytest.raises(MalformedError, match="line 1: not JSON"):
        list(values(stream))
    assert stream.tell() < 1_000_000
