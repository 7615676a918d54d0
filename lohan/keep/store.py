"""A run's store without its model: what it holds, whether it is whole, and how to mend it.

open     the folders of its drives; refused while a process trains on them
damaged  every grain that the newest commit names, read and compared with its checksum
mend     a damaged grain, from a copy: of the store itself, or a checkpoint. What fits the checksum is the grain, wherever it
         comes from; nothing else is written
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lohan.config import StoreMode
from lohan.errors import OptionError, StoreError
from lohan.host.pool import HostPool
from lohan.keep.manifest import Layout, Manifest, parse_layout, read_manifest
from lohan.keep.planes import Progress, opened_planes, read_range
from lohan.run.places import NOWHERE, UnitLayout
from lohan.schedule.slots import Role
from lohan.ssd.checked import CheckedStore, ChecksumError, Extent
from lohan.ssd.durable import FILE_NAME, META_NAME, drives_of
from lohan.ssd.file_store import FileStore
from lohan.ssd.records import Commit, RecordFile, read_header

NUM_BUFFERS = 8
_FROZEN, _GRADIENT = -1, -2


@dataclass(frozen=True, slots=True)
class Grain:
    """A part of the store that a commit names."""

    extent: Extent
    number: int
    unit: int
    plane: int
    """0: trainable weights; from 1: planes of state; -1: frozen weights; -2: a gradient that waits for its update"""

    @property
    def address(self) -> int:
        return self.extent.address + self.number * self.extent.grain_bytes

    @property
    def nbytes(self) -> int:
        return self.extent.grain_size(self.number)


class Copy(Protocol):
    """Where a grain may be found again."""

    def read(self, grain: Grain, into: Tensor) -> bool:
        """Whether it has something in that place; the caller compares it."""
        ...


class StoredRun:
    """The store of a run, opened; close it."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = drives_of(folders)
        path = self.folders[0] / META_NAME
        self.header = header = read_header(path)
        records = RecordFile.open(path)
        records.close()
        self.commit = _committed(path, records.last)
        self.layout: Layout = parse_layout(path, header["layout"])
        self.mode = StoreMode(header["fingerprint"]["store"])
        self._units = UnitLayout(self.mode, self.layout)
        store = FileStore.open(self.folders, header["nbytes"], file_name=FILE_NAME, stripe_bytes=header["stripe_bytes"])
        self.store = CheckedStore(store, self._units.extents)
        try:
            self._units.places.restore(self.commit.places)
            self.store.restore(self.commit.table)
        except BaseException:
            self.store.close()
            raise

    @property
    def run_id(self) -> str:
        return str(self.header["run"])

    def close(self) -> None:
        self.store.close()

    def grains(self) -> Iterator[Grain]:
        """All that the commit names."""
        for unit, place in enumerate(self.commit.places):
            if place != NOWHERE:
                for plane, extent in enumerate(self._units.places.extents(place)):
                    yield from _grains(extent, unit, plane)
        for (role, unit), extent in self._units.fixed.items():
            if role is Role.FROZEN:
                yield from _grains(extent, unit, _FROZEN)
            elif self.commit.redo is not None and unit in self.commit.redo.present:
                yield from _grains(extent, unit, _GRADIENT)

    def damaged(self, progress: Progress) -> list[Grain]:
        """What is not as it was written, or cannot be read. Reads all of it."""
        grains = list(self.grains())
        total, done, found = sum(grain.nbytes for grain in grains), 0, []
        with closing(HostPool(nbytes := NUM_BUFFERS * max((grain.nbytes for grain in grains), default=0))) as pool:
            pool.reserve(nbytes)
            buffers = [pool.allocate(nbytes // NUM_BUFFERS, f"grain {i}") for i in range(NUM_BUFFERS)] if grains else []
            flying: deque[tuple[Grain, Callable[[], None]]] = deque()
            for number, grain in enumerate([*grains, *[None] * NUM_BUFFERS]):
                if len(flying) == NUM_BUFFERS or grain is None and flying:
                    landed, wait = flying.popleft()
                    try:
                        wait()
                    except StoreError:
                        found.append(landed)
                    done += landed.nbytes
                    progress("verify store", done, total)
                if grain is not None:
                    buffer = buffers[number % NUM_BUFFERS][: grain.nbytes]
                    flying.append((grain, self.store.submit_read([(grain.address, buffer)]).wait))
        return found

    def mend(self, grain: Grain, copies: Sequence[Copy]) -> bool:
        """Whether one of the copies had it. What was written is read back."""
        with closing(HostPool(grain.nbytes)) as pool:
            pool.reserve(grain.nbytes)
            buffer = pool.allocate(grain.nbytes, "grain")
            for copy in copies:
                if copy.read(grain, buffer) and self._fits(grain, buffer):
                    self.store.unchecked.submit_write([(grain.address, buffer)]).wait()
                    self.store.flush()
                    buffer.zero_()
                    self.store.submit_read([(grain.address, buffer)]).wait()
                    return True
        return False

    def _fits(self, grain: Grain, buffer: Tensor) -> bool:
        try:
            self.store.verify(grain.address, buffer)
        except ChecksumError:
            return False
        return True


class StoreCopy:
    """A copy of all the folders of a store, made while nothing trained on them."""

    def __init__(self, folders: Sequence[Path], of: StoredRun) -> None:
        ordered = drives_of(folders)
        header = read_header(ordered[0] / META_NAME)
        if (header["run"], header["nbytes"]) != (of.header["run"], of.header["nbytes"]):
            raise OptionError("from", [str(folder) for folder in folders], "it is a copy of another store", "Name another copy")
        self._store = FileStore.open(ordered, header["nbytes"], file_name=FILE_NAME, stripe_bytes=header["stripe_bytes"])

    def close(self) -> None:
        self._store.close()

    def read(self, grain: Grain, into: Tensor) -> bool:
        try:
            self._store.submit_read([(grain.address, into)]).wait()
        except StoreError:
            return False
        return True


class CheckpointCopy:
    """A checkpoint of the same run, or of one that it goes on from: the same step, or what no step changes."""

    def __init__(self, folder: Path, of: StoredRun) -> None:
        self._folder, self._manifest = folder, read_manifest(folder)
        if self._manifest.layout != of.layout:
            raise OptionError("from", str(folder), "it is a checkpoint of another model", "Name another copy")
        self._offsets = plane_offsets(self._manifest)

    def read(self, grain: Grain, into: Tensor) -> bool:
        start = self._offsets.get((grain.unit, grain.plane))
        if start is None:
            return False
        try:
            with opened_planes(self._folder, self._manifest) as file:
                read_range(file, start + grain.number * grain.extent.grain_bytes, into)
        except StoreError:
            return False
        return True


def plane_offsets(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Where each plane of each unit begins in a checkpoint's file."""
    offsets: dict[tuple[int, int], int] = {}
    for piece in manifest.layout.pieces():
        offsets.setdefault((piece.unit, piece.plane), piece.offset)
    return offsets


def store_bytes(folders: Sequence[Path]) -> int:
    """What the files of a store take of their drives."""
    files = [folder / name for folder in folders for name in (FILE_NAME, META_NAME)]
    return sum(os.stat(path).st_blocks * 512 for path in files if path.exists())


def _grains(extent: Extent, unit: int, plane: int) -> Iterator[Grain]:
    return (Grain(extent, number, unit, plane) for number in range(extent.num_grains))


def _committed(path: Path, commit: Commit | None) -> Commit:
    if commit is None:
        raise OptionError("store", str(path.parent), "its run never came to a commit", "Remove it, and begin anew")
    return commit
