"""Folders that are whole or not there: written under another name, made durable, and renamed.

    write     into `.NAME.partial`, beside where the folder is to be
    sync      every file and folder in it, so that no name can outlive what it names
    rename    the one before to `.NAME.replaced`, if there is one; then the new one to NAME; then the folder above is synced
    remove    rename to `.NAME.removed`, sync, and only then take it apart

Whatever happens in between, NAME is whole, old or new, or it is not there. `tidy` clears away what a crash left, and puts back
a folder that was to be replaced by one that never came.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lohan.ssd.files import sync_folder

_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """A folder to write to. It becomes `folder` when the block ends, and nothing if the block raises."""
    partial = _aside(folder, _PARTIAL)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _sync_tree(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    replaced = _aside(folder, _REPLACED)
    if os.path.lexists(folder):
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """The folder goes, at once; a crash leaves no half of it under its name."""
    removed = _aside(folder, _REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    sync_folder(folder.parent)
    shutil.rmtree(removed)


def tidy(folder: Path, prefix: str) -> None:
    """What a crash left in `folder` of folders whose names begin with `prefix`."""
    for path in sorted(folder.glob(f".{prefix}*")):
        target = folder / path.name[1:].removesuffix(path.suffix)
        if path.suffix == _REPLACED and not os.path.lexists(target):
            path.rename(target)
        elif path.suffix in (_PARTIAL, _REPLACED, _REMOVED):
            shutil.rmtree(path)


def _aside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = os.open(Path(place, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(place))
