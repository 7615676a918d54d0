"""Where an engine's stores come from: drives, as users name them, or a function, as tests do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import StoreMode
from lohan.ssd.base import Store
from lohan.ssd.durable import Contents, Durable, Origin, mode_of, open_durable
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

    def mode(self, wanted: StoreMode | None, nbytes: Mapping[StoreMode, int]) -> StoreMode:
        if wanted is None and (there := mode_of(self.folders)) is not None:
            return there
        if wanted is not None:
            return wanted
        needs_log = not self._fits(nbytes[StoreMode.DOUBLE]) and self._fits(nbytes[StoreMode.LOG])
        return StoreMode.LOG if needs_log else StoreMode.DOUBLE

    def _fits(self, nbytes: int) -> bool:
        """Whether every drive has room for its share, as far as that can be told beforehand."""
        share = nbytes / len(self.folders)
        places = [next(p for p in (Path(f).absolute(), *Path(f).absolute().parents) if p.exists()) for f in self.folders]
        return all(shutil.disk_usage(place).free >= share for place in places)

    def open_units(self, contents: Contents) -> Durable:
        return open_durable(self.folders, contents, self.fingerprint, resume=self.resume, origin=self.origin)

    def make_spill(self, nbytes: int) -> Store:
        return FileStore.create(self.folders, nbytes, file_name="boundaries", unlinked=True)


@dataclass(frozen=True, slots=True)
class MadeStores:
    """Stores without a record: nothing goes on from them."""

    make_store: MakeStore

    def mode(self, wanted: StoreMode | None, nbytes: Mapping[StoreMode, int]) -> StoreMode:
        return wanted or StoreMode.DOUBLE

    def open_units(self, contents: Contents) -> Durable:
        return Durable(self.make_store(contents.nbytes, "store", False))

    def make_spill(self, nbytes: int) -> Store:
        return self.make_store(nbytes, "boundaries", True)
