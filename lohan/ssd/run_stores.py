"""Where an engine's stores come from: drives, as users name them, or a function, as tests do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import StoreMode
from lohan.errors import OptionError
from lohan.ssd.base import Store
from lohan.ssd.durable import Contents, Durable, Origin, check_room, mode_of, open_durable
from lohan.ssd.file_store import FileStore

MakeStore = Callable[[int, str, bool], Store]
"""bytes, file name, whether it vanishes with the process -> store"""


@dataclass(frozen=True, slots=True)
class DriveStores:
    """A folder on each drive."""

    folders: Sequence[str | Path]
    resume: bool
    fingerprint: Mapping[str, Any]
    origin: Origin | None = None

    def mode(self, wanted: StoreMode | None, contents: Mapping[StoreMode, Contents], spill_bytes: int) -> StoreMode:
        there = mode_of(self.folders) if wanted is None else wanted
        if there is not None:
            return there
        try:
            self.check_room(contents[StoreMode.DOUBLE], spill_bytes)
        except OptionError:
            return StoreMode.LOG
        return StoreMode.DOUBLE

    def check_room(self, contents: Contents, spill_bytes: int) -> None:
        check_room(self.folders, contents, spill_bytes)

    def open_units(self, contents: Contents) -> Durable:
        return open_durable(self.folders, contents, self.fingerprint, resume=self.resume, origin=self.origin)

    def make_spill(self, nbytes: int) -> Store:
        return FileStore.create(self.folders, nbytes, file_name="boundaries", unlinked=True)


@dataclass(frozen=True, slots=True)
class MadeStores:
    """Stores without a record: nothing goes on from them."""

    make_store: MakeStore

    def mode(self, wanted: StoreMode | None, contents: Mapping[StoreMode, Contents], spill_bytes: int) -> StoreMode:
        return wanted or StoreMode.DOUBLE

    def check_room(self, contents: Contents, spill_bytes: int) -> None: ...

    def open_units(self, contents: Contents) -> Durable:
        return Durable(self.make_store(contents.nbytes, "store", False))

    def make_spill(self, nbytes: int) -> Store:
        return self.make_store(nbytes, "boundaries", True)
