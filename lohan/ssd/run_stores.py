"""Where an engine's stores come from: drives, as users name them, or a function, as tests do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.ssd.base import Store
from lohan.ssd.durable import Durable, Origin, open_durable
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

    def open_units(self, nbytes: int) -> Durable:
        return open_durable(self.folders, nbytes, self.fingerprint, resume=self.resume, origin=self.origin)

    def make_spill(self, nbytes: int) -> Store:
        return FileStore.create(self.folders, nbytes, file_name="boundaries", unlinked=True)


@dataclass(frozen=True, slots=True)
class MadeStores:
    """Stores without a record: nothing goes on from them."""

    make_store: MakeStore

    def open_units(self, nbytes: int) -> Durable:
        return Durable(self.make_store(nbytes, "store", False))

    def make_spill(self, nbytes: int) -> Store:
        return self.make_store(nbytes, "boundaries", True)
