"""A store on drives: one preallocated O_DIRECT file per folder, the address space striped over them.

The kernel's answer to every transfer is looked at. A short one is continued, from the last whole block where it ended inside
one; end of file and errors become a StoreError with path, offset, wanted and got bytes, and errno.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lohan.errors import OptionError, StoreError
from lohan.ssd.base import BLOCK_BYTES
from lohan.ssd.files import OpenFile, create_file, open_file
from lohan.ssd.striped import CHUNK_BYTES, NUM_THREADS, STALL_S, STRIPE_BYTES, StripedStore
from lohan.ssd.stripes import Stripes
from lohan.ssd.throttle import Throttle

MAX_FRUITLESS = 3
"""transfers in a row that do not finish a block before it is an error"""


class FileStore(StripedStore):
    """Bytes in files. `create` makes one, `open` finds one again."""

    def __init__(
        self,
        files: Sequence[OpenFile],
        nbytes: int,
        stripes: Stripes,
        *,
        threads: int,
        stall_s: float,
        throttle: Throttle | None,
    ) -> None:
        self._files = list(files)
        super().__init__(nbytes, stripes, threads=threads, stall_s=stall_s, throttle=throttle)

    @classmethod
    def create(
        cls,
        directories: Sequence[str | Path],
        nbytes: int,
        *,
        file_name: str = "store",
        unlinked: bool = False,
        stripe_bytes: int = STRIPE_BYTES,
        threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        stall_s: float = STALL_S,
        throttle: Throttle | None = None,
    ) -> FileStore:
        """A store of `nbytes` zeros, one file per directory; `unlinked`: files without a name, gone with the process.

        Name each drive once: all directories take equal shares, and I/O runs on them side by side.
        """
        folders = _check_distinct(directories)
        stripes = Stripes(len(folders), stripe_bytes, chunk_bytes)
        files: list[OpenFile] = []
        try:
            for folder in folders:
                files.append(create_file(folder, file_name, stripes.file_bytes(nbytes), unlinked=unlinked))
            return cls(files, nbytes, stripes, threads=threads, stall_s=stall_s, throttle=throttle)
        except BaseException:
            for file in files:
                os.close(file.fd)
                if not unlinked:
                    file.path.unlink()
            raise

    @classmethod
    def open(
        cls,
        directories: Sequence[str | Path],
        nbytes: int,
        *,
        file_name: str = "store",
        stripe_bytes: int = STRIPE_BYTES,
        threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        stall_s: float = STALL_S,
        throttle: Throttle | None = None,
    ) -> FileStore:
        """A store that `create` made, with the same folders in the same order. Nothing is initialised."""
        folders = _check_distinct(directories)
        stripes = Stripes(len(folders), stripe_bytes, chunk_bytes)
        files: list[OpenFile] = []
        try:
            for folder in folders:
                files.append(open_file(folder, file_name, stripes.file_bytes(nbytes)))
            return cls(files, nbytes, stripes, threads=threads, stall_s=stall_s, throttle=throttle)
        except BaseException:
            for file in files:
                os.close(file.fd)
            raise

    def read_piece(self, file: int, offset: int, buffer: memoryview) -> None:
        transfer("read", os.preadv, self._files[file], offset, buffer)

    def write_piece(self, file: int, offset: int, buffer: memoryview) -> None:
        transfer("write", os.pwritev, self._files[file], offset, buffer)

    def sync_file(self, file: int) -> None:
        path, fd = self._files[file].path, self._files[file].fd
        try:
            os.fdatasync(fd)
        except OSError as error:
            raise StoreError("flush", str(path), 0, 0, 0, error.errno, str(error)) from error

    def file_name(self, file: int) -> str:
        return str(self._files[file].path)

    def release(self) -> None:
        for file in self._files:
            os.close(file.fd)
        self._files.clear()


def _check_distinct(directories: Sequence[str | Path]) -> list[Path]:
    folders = [Path(os.path.abspath(directory)) for directory in directories]
    if not folders:
        raise OptionError("ssd", [], "a store needs a folder", "Name one on each drive to use")
    if len(set(folders)) < len(folders):
        raise OptionError("ssd", [str(folder) for folder in folders], "a folder is named twice", "Name each drive once")
    return folders


def transfer(
    action: str, call: Callable[[int, list[memoryview], int], int], file: OpenFile, offset: int, buffer: memoryview
) -> None:
    """Move all of `buffer`, by as many system calls as it takes."""
    done, num_fruitless = 0, 0
    while done < len(buffer):
        try:
            got = call(file.fd, [buffer[done:]], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise StoreError(action, str(file.path), offset, len(buffer), done, error.errno, str(error)) from error
        if got <= 0:
            raise StoreError(action, str(file.path), offset, len(buffer), done, None, "the file ends here")
        end = done + got
        if end < len(buffer):
            end -= end % BLOCK_BYTES  # O_DIRECT continues at whole blocks only
        num_fruitless = 0 if end > done else num_fruitless + 1
        if num_fruitless == MAX_FRUITLESS:
            reason = f"{MAX_FRUITLESS} transfers in a row stopped inside the first block"
            raise StoreError(action, str(file.path), offset, len(buffer), done, None, reason)
        done = end
