"""A run's store with its record: made for a new run, or opened again for one that goes on.

    new      allowed where no run is, or where one never came to its first commit. Files are made, then the headers
    resume   every drive of the run is there, and belongs to the same one; its fingerprint is what this run's would be
    return   a run that begins with a checkpoint of the run that is there: its records go, durably, and then it is a new one.
             So does a run with one place a unit, whose checkpoint takes its place after a crash

Nothing is written, and nothing is lost, before all of that is known.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan.config import StoreMode
from lohan.errors import OptionError
from lohan.ssd.base import BLOCK_BYTES, Store
from lohan.ssd.file_store import FileStore
from lohan.ssd.files import check_space, sync_folder
from lohan.ssd.records import Commit, RecordError, RecordFile, file_bytes, read_header
from lohan.ssd.striped import STRIPE_BYTES
from lohan.ssd.stripes import Stripes

FILE_NAME, META_NAME = "store", "store.meta"
FORMAT = 3
OWN_BYTES = 2**20
"""that a filesystem may want on each drive for the files' own records"""
MODE = "store"
"""how the fingerprint of a run names its mode"""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a store has to hold."""

    nbytes: int
    table_bytes: int
    """of its checksums"""
    mode: StoreMode
    layout: Mapping[str, Any]
    """the units, for whoever reads the store without the model"""


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a run begins with."""

    run: str
    """that it was saved by, and that goes on with it"""
    checkpoint: str
    """which one: its identity"""


@dataclass(frozen=True, slots=True)
class Durable:
    """What outlives the process. Stores in memory have no record."""

    store: Store
    records: RecordFile | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def resumed(self) -> Commit | None:
        """The state that the run goes on from; None for a new one."""
        return None if self.records is None else self.records.last


def open_durable(
    folders: Sequence[str | Path],
    contents: Contents,
    fingerprint: Mapping[str, Any],
    *,
    resume: bool,
    origin: Origin | None = None,
) -> Durable:
    """The store for these contents in these folders: new, or as the run left it with `resume`.

    With an `origin`, a run that began with it is gone on with, and one that it was saved by gives way to it.
    """
    paths = [Path(folder) for folder in folders]
    fingerprint = {**fingerprint, MODE: contents.mode.value}
    found = find_run(paths)
    if found is None:
        return _create(paths, contents, fingerprint, origin)
    if origin is not None:
        header = read_header(drives_of(paths)[0] / META_NAME)
        if header.get("origin") != origin.checkpoint or not found.whole:
            if header["run"] != origin.run:
                reason = f"another run than the checkpoint's is there, at step {found.step}, and would be lost"
                raise OptionError("ssd", _named(paths), reason, "Name another folder, or remove this one")
            _forget(paths, header)
            return _create(paths, contents, fingerprint, origin)
    if not resume:
        reason = f"a run is there, at step {found.step}, and would be lost"
        raise OptionError("ssd", _named(paths), reason, "Go on with it (resume=True), name another folder, or remove this one")
    return _reopen(paths, contents.nbytes, fingerprint)


def mode_of(folders: Sequence[str | Path]) -> StoreMode | None:
    """How the run in these folders keeps its state; None where there is none."""
    paths = [Path(folder) for folder in folders]
    if find_run(paths) is None:
        return None
    header = next(read_header(path / META_NAME) for path in paths if (path / META_NAME).exists())
    return next((mode for mode in StoreMode if mode.value == header["fingerprint"].get(MODE)), None)


def check_room(folders: Sequence[str | Path], contents: Contents, spill_bytes: int) -> None:
    """Room for the files of a run that begins in these folders, or goes on there, and for what vanishes with its process.

    Refused where there is not; nothing has been made then.
    """
    paths = [Path(folder) for folder in folders]
    stripes = Stripes(len(paths), STRIPE_BYTES, BLOCK_BYTES)
    needed = [stripes.file_bytes(spill_bytes)] * len(paths)
    if find_run(paths) is None:
        made = OWN_BYTES + stripes.file_bytes(contents.nbytes) + file_bytes(contents.table_bytes)
        needed = [one + made - _replaced_bytes(path) for one, path in zip(needed, paths, strict=True)]
    check_space(paths, needed)


def _replaced_bytes(folder: Path) -> int:
    """What a run without a commit left there, which gives way."""
    left = [path for path in (folder / FILE_NAME, folder / META_NAME) if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in left)


def find_run(folders: Sequence[Path]) -> Commit | None:
    """The newest commit in any of these folders; None where there is nothing to lose."""
    commits = []
    for folder in folders:
        if (folder / META_NAME).exists():
            records = RecordFile.open(folder / META_NAME)
            records.close()
            commits += [records.last] if records.last is not None else []
    return max(commits, key=lambda commit: commit.number, default=None)


def remove_store(folders: Sequence[Path]) -> None:
    """A run goes, with its files. Refused while a process has it open."""
    ordered = drives_of(folders)
    _forget(ordered, read_header(ordered[0] / META_NAME))
    for folder in ordered:
        (folder / FILE_NAME).unlink()
        sync_folder(folder)


def _forget(folders: Sequence[Path], header: Mapping[str, Any]) -> None:
    """Nothing in these folders is a run any more, whatever happens next. Refused while a process has it open."""
    ordered = drives_of(folders)
    store = FileStore.open(ordered, header["nbytes"], file_name=FILE_NAME, stripe_bytes=header["stripe_bytes"])
    try:
        for folder in ordered:  # the first has the records: without them nothing is there to lose
            (folder / META_NAME).unlink()
            sync_folder(folder)
    finally:
        store.close()


def _create(folders: Sequence[Path], contents: Contents, fingerprint: Mapping[str, Any], origin: Origin | None) -> Durable:
    store = FileStore.create(folders, contents.nbytes, file_name=FILE_NAME)
    files: list[RecordFile] = []
    try:
        run = secrets.token_hex(8) if origin is None else origin.run
        shared = {"format": FORMAT, "run": run, "of": len(folders), "nbytes": contents.nbytes, "stripe_bytes": STRIPE_BYTES}
        shared |= {"layout": contents.layout}
        shared |= {"fingerprint": fingerprint, "origin": None if origin is None else origin.checkpoint}
        headers = [{**shared, "drive": drive} for drive in range(len(folders))]
        for folder, header in zip(folders, headers, strict=True):
            files.append(RecordFile.create(folder / META_NAME, header, contents.table_bytes))
    except BaseException:
        for file in files:
            file.close()
            file.path.unlink(missing_ok=True)
        for folder in folders:
            (folder / FILE_NAME).unlink(missing_ok=True)
        store.close()
        raise
    for other in files[1:]:
        other.close()
    return Durable(store, files[0], run)


def _reopen(folders: Sequence[Path], nbytes: int, fingerprint: Mapping[str, Any]) -> Durable:
    ordered = drives_of(folders)
    header = read_header(ordered[0] / META_NAME)
    there = {**header["fingerprint"], "format": header.get("format")}
    if found := differences(there, {**fingerprint, "format": FORMAT}):
        reason = f"the run there is another one: {'; '.join(found)}"
        raise OptionError("ssd", _named(folders), reason, "Use its settings to go on with it, or name another folder")
    if header["nbytes"] != nbytes:
        reason = f"the store there has {header['nbytes']} bytes, this run's {nbytes}"
        raise OptionError("ssd", _named(folders), reason, "Name another folder")
    store = FileStore.open(ordered, nbytes, file_name=FILE_NAME, stripe_bytes=header["stripe_bytes"])
    try:
        records = RecordFile.open(ordered[0] / META_NAME)
        if records.last is not None and not records.last.whole:
            records.close()
            reason = f"the run there ended while step {records.last.step} was being overwritten, as a store of one place does"
            remedy = "Go on from a checkpoint of it (resume_from_checkpoint), or remove the folder and begin anew"
            raise OptionError("ssd", _named(folders), reason, remedy)
        return Durable(store, records, header["run"])
    except BaseException:
        store.close()
        raise


def drives_of(folders: Sequence[Path]) -> list[Path]:
    """The folders in the order in which the run has them; refused unless they are all of its own and no others."""
    headers: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        try:
            headers[folder] = read_header(folder / META_NAME)
        except (FileNotFoundError, RecordError) as error:
            reason = f"{folder} does not belong to the run in the other folders ({error})"
            raise OptionError("ssd", _named(folders), reason, "Name all folders of the run, and no others") from error
    runs = {header["run"] for header in headers.values()}
    num = next(iter(headers.values()))["of"]
    ordered = sorted(headers, key=lambda folder: headers[folder]["drive"])
    if len(runs) > 1 or [headers[folder]["drive"] for folder in ordered] != list(range(num)):
        reason = f"the run has {num} folders, and these are not all of them" if len(runs) == 1 else "they hold several runs"
        raise OptionError("ssd", _named(folders), reason, "Name all folders of the run, and no others")
    return ordered


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words."""
    names = sorted({*there, *here})
    return [f"{n} was {there.get(n)!r}, is {here.get(n)!r}" for n in names if there.get(n) != here.get(n)]


def _named(folders: Sequence[Path]) -> list[str]:
    return [os.fspath(folder) for folder in folders]
