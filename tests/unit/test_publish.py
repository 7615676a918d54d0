"""A folder under its name is whole, wherever the process dies; and its names are durable only after its bytes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lohan.keep import publish
from lohan.keep.publish import publishing, remove, tidy

FILES = ("one", "deep/two", "three")
WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def write(folder: Path, text: str) -> None:
    with publishing(folder) as partial:
        (partial / "deep").mkdir()
        for name in FILES:
            (partial / name).write_text(text)


def whole(folder: Path) -> str | None:
    """The text of a folder that is there; fails for half of one."""
    if not folder.exists():
        return None
    texts = {(folder / name).read_text() for name in FILES}
    assert len(texts) == 1 and len(list(folder.rglob("*"))) == 4
    return texts.pop()


def die_at(event: int, action: Callable[[], None]) -> bool:
    """Do it in a child that is gone at its n-th change or use of a name; whether it came to its end."""
    if (child := os.fork()) == 0:
        num_seen = 0

        def watch(name: str, _: tuple[object, ...]) -> None:
            nonlocal num_seen
            num_seen += name in WATCHED
            if name in WATCHED and num_seen == event:
                os._exit(9)

        sys.addaudithook(watch)
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def crash_points(
    tmp_path: Path, prepare: Callable[[Path], None], action: Callable[[Path], None]
) -> list[tuple[str | None, ...]]:
    """What is under the names `checkpoint-1` and `checkpoint-2` after a death at every point, before and after tidying."""
    found: list[tuple[str | None, ...]] = []
    for event in range(1, 200):
        place = tmp_path / f"point {event}"
        place.mkdir()
        prepare(place)
        ended = die_at(event, lambda place=place: action(place))  # type: ignore[misc]
        seen = [whole(place / name) for name in ("checkpoint-1", "checkpoint-2")]
        tidy(place, "checkpoint-")
        after = [whole(place / name) for name in ("checkpoint-1", "checkpoint-2")]
        assert {path.name for path in place.iterdir()} <= {"checkpoint-1", "checkpoint-2"}
        found.append((*seen, *after))
        shutil.rmtree(place)
        if ended:
            return found
    raise AssertionError("it never came to its end")


def test_a_death_while_publishing_leaves_nothing_or_all(tmp_path: Path) -> None:
    found = crash_points(
        tmp_path, lambda place: write(place / "checkpoint-1", "a"), lambda place: write(place / "checkpoint-2", "b")
    )
    assert len(found) > 10 and set(found) == {("a", None, "a", None), ("a", "b", "a", "b")}
    assert found == sorted(found, key=lambda one: one[1] is not None)


def test_a_death_while_replacing_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Between two renames neither has the name: then the old one gets it back."""
    found = crash_points(
        tmp_path, lambda place: write(place / "checkpoint-1", "old"), lambda place: write(place / "checkpoint-1", "new")
    )
    assert {one[2] for one in found} == {"old", "new"} and found[-1][0] == "new"
    assert any(one[0] is None and one[2] == "old" for one in found)


def test_a_death_while_removing_leaves_all_or_nothing(tmp_path: Path) -> None:
    found = crash_points(
        tmp_path, lambda place: write(place / "checkpoint-1", "a"), lambda place: remove(place / "checkpoint-1")
    )
    assert len(found) > 8 and {one[0] for one in found} == {"a", None} and all(one[0] == one[2] for one in found)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1", "a")
    with pytest.raises(KeyboardInterrupt), publishing(tmp_path / "checkpoint-1") as partial:
        (partial / "one").write_text("b")
        raise KeyboardInterrupt
    assert whole(tmp_path / "checkpoint-1") == "a" and len(list(tmp_path.iterdir())) == 1


def test_bytes_are_durable_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is synced under the partial name, then renamed, then the folder above is synced."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(publish.os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path / "new", "a")
    assert sorted(events[:5]) == sorted(f"sync .new.partial{part}" for part in ("", "/one", "/three", "/deep", "/deep/two"))
    assert events[4] == "sync .new.partial" and events.index("sync .new.partial/deep/two") < events.index(
        "sync .new.partial/deep"
    )
    assert events[5:] == ["rename .new.partial new", "sync ."]
