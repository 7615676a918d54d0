"""A cache is made once, whole or not at all, for nobody but its owner, and again if anything that it depends on has changed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from lohan.data import DataSettings, TokenDataset, open_rows, tokenize
from lohan.data.cache import CacheWriter, writing
from lohan.data.encoding import Encoder
from lohan.errors import OptionError
from tests.tiny_tokenizer import MARKED, PLAIN, tiny_tokenizer

ROWS = [{"text": f"hello world {number}"} for number in range(300)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def made(source: Any, tmp_path: Path, tokenizer: Any = None, **settings: Any) -> TokenDataset:
    return tokenize(open_rows(source), tokenizer or tiny_tokenizer(), DataSettings(**settings), tmp_path / "tokens")


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "tokens").iterdir())


def test_what_is_kept_is_what_was_made(source: Path, tmp_path: Path) -> None:
    first, again = made(source, tmp_path), made(source, tmp_path)
    assert not first.reused and again.reused
    assert kept(tmp_path) == [first.folder.name]
    assert len(first) == len(again) == 300
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.labels, other.labels)
    assert (str(first), first.notes, first.counts, first.format) == (str(again), again.notes, again.counts, again.format)
    assert first.lengths.tolist() == [len(example.input_ids) for example in first]
    assert first.counts.tokens == first.lengths.sum()


def test_examples_are_views_of_the_file_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    example = made(source, tmp_path)[7]
    assert not example.input_ids.flags.owndata and not example.input_ids.flags.writeable
    assert example.input_ids.dtype == example.labels.dtype == np.int32


def touch(source: Path) -> None:
    os.utime(source, ns=(0, 1 + source.stat().st_mtime_ns))


def append(source: Path) -> None:
    status = source.stat()
    source.write_text(source.read_text() + '\n{"text": "more"}')
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, append])
def test_other_files_are_other_tokens(source: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    made(source, tmp_path)
    change(source)
    assert not made(source, tmp_path).reused
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize(
    ("settings", "matters"),
    [
        ({"max_length": 7}, True),
        ({"too_long": "drop"}, True),
        ({"completion_only_loss": False}, True),
        ({"seed": 1, "packing": True}, False),
        ({"group_by_length": True}, False),
    ],
)
def test_settings_that_matter(source: Path, tmp_path: Path, settings: dict[str, Any], matters: bool) -> None:
    made(source, tmp_path)
    assert made(source, tmp_path, **settings).reused is not matters


def test_tokenizers_that_matter(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path, tiny_tokenizer(PLAIN))
    same = tiny_tokenizer(PLAIN)
    same(["a", "b b"], padding=True)  # which leaves traces in it
    assert made(source, tmp_path, same).reused
    larger = tiny_tokenizer(PLAIN)
    larger.add_tokens(["more"])
    ends_otherwise = tiny_tokenizer(PLAIN)
    ends_otherwise.eos_token = "<pad>"
    for other in (tiny_tokenizer(MARKED), larger, ends_otherwise):
        assert not made(source, tmp_path, other).reused


def test_rows_without_a_file_are_known_by_what_they_hold(tmp_path: Path) -> None:
    made(ROWS, tmp_path)
    assert made([dict(row) for row in ROWS], tmp_path).reused
    assert made(datasets.Dataset.from_list(ROWS).to_iterable_dataset(), tmp_path).reused
    assert not made([*ROWS[:-1], {"text": "else"}], tmp_path).reused
    table = datasets.Dataset.from_list(ROWS)
    made(table, tmp_path)
    assert made(table, tmp_path).reused
    assert not made(table.select(range(10)), tmp_path).reused


def test_nobody_else_reads_it(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = made(source, tmp_path).folder
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_that_others_write_to_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens").chmod(0o777)
    with pytest.raises(OptionError, match="cache_dir=.*written by other users. .*chmod 700"):
        made(source, tmp_path)
    (tmp_path / "tokens").chmod(0o700)
    made(source, tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a file")
    with pytest.raises(OptionError, match="cache_dir=.*cannot be made"):
        made(source, tmp_path)


def test_a_bad_row_leaves_nothing(source: Path, tmp_path: Path) -> None:
    append(source)
    source.write_text(source.read_text() + "\n{")
    with pytest.raises(OptionError, match="line 302"):
        made(source, tmp_path)
    assert kept(tmp_path) == []


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CacheWriter, "append", interrupt)
        made(source, tmp_path)
    assert kept(tmp_path) == []
    assert not made(source, tmp_path).reused


def test_a_full_disk_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OptionError, match="cache_dir=.*no space is left there for tokens.*another drive"):
        made(source, tmp_path)
    assert kept(tmp_path) == []


def test_a_killed_writer_s_remains_are_removed_and_a_living_one_s_are_not(source: Path, tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from lohan.data.cache import writing\n"
    code += "with writing(Path(sys.argv[1])): os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "tokens")], cwd=Path(__file__).parents[2], check=False)
    assert len(kept(tmp_path)) == 1
    living = tmp_path / "tokens" / ".building-living"
    living.mkdir()
    lock = os.open(living, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made(source, tmp_path).folder
        assert kept(tmp_path) == [".building-living", folder.name]
    finally:
        os.close(lock)


def test_a_cache_of_the_wrong_size_is_made_again(source: Path, tmp_path: Path) -> None:
    first = made(source, tmp_path)
    tokens = [example.input_ids.tolist() for example in first]
    (first.folder / "labels.bin").write_bytes(b"short")
    again = made(source, tmp_path)
    assert not again.reused and [example.input_ids.tolist() for example in again] == tokens


def test_two_writers_make_one_cache(source: Path, tmp_path: Path) -> None:
    """Whoever is slower finds it published."""
    about = {"tokens": 1, "examples": 1}
    one = np.array([1], np.int32)
    with writing(tmp_path / "tokens") as slow:
        slow.append(one, one)
        with writing(tmp_path / "tokens") as fast:
            fast.append(one, one)
            fast.publish(tmp_path / "tokens", "key", about)
        files = slow.publish(tmp_path / "tokens", "key", about)
    assert files.input_ids.tolist() == [1]
    assert kept(tmp_path) == ["key"]


def test_progress_is_told_from_the_first_moment_to_the_end(source: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    tokenize(open_rows(source), tiny_tokenizer(), DataSettings(), tmp_path / "tokens", lambda *what: told.append(what))
    size = source.stat().st_size
    assert told[0] == ("tokenise", 0, size) and told[-1] == ("tokenise", size, size)
    assert len(told) > 4 and [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    told.clear()
    tokenize(open_rows(ROWS), tiny_tokenizer(), DataSettings(), tmp_path / "tokens", lambda *what: told.append(what))
    assert told[-1] == ("tokenise", 300, 300)


def test_rows_are_never_all_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small group at a time, and smaller ones if rows are large."""
    sizes: list[int] = []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, rows: (sizes.append(len(rows)), encode(self, rows))[1])
    monkeypatch.setattr("lohan.data.dataset._GROUP_CHARACTERS", 2000)
    made([*ROWS, *[{"text": "sky" * 600}] * 4], tmp_path, max_length=16)
    assert sum(sizes) == 304 and max(sizes) <= 64 and sizes[-1] <= 2
