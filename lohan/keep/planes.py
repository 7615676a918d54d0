"""The state of a run into a checkpoint's `planes`, and back: piece by piece, checked on the way.

    save     read from the run, checksum, write; several pieces are on their way from the run at once
    verify   read back from the drive, past the page cache, and compare
    load     read, compare, and only then hand it to the run

Memory: NUM_BUFFERS pieces, whatever the model's size.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lohan.checksum import checksum
from lohan.errors import StoreError
from lohan.host.pool import HostPool
from lohan.keep.manifest import PIECE_ELEMENTS, PLANES_NAME, CheckpointError, Layout, Manifest, Piece
from lohan.ssd.file_store import transfer
from lohan.ssd.files import OpenFile

NUM_BUFFERS = 4
_BUFFER_BYTES = 4 * PIECE_ELEMENTS
"""no plane has wider elements than fp32"""
Progress = Callable[[str, int, int | None], None]


class Arrival(Protocol):
    """A piece on its way."""

    def wait(self) -> None: ...


class RunState(Protocol):
    """The planes of a run, wherever it keeps them."""

    def submit_read(self, piece: Piece, into: Tensor) -> Arrival: ...

    def submit_write(self, piece: Piece, data: Tensor) -> Arrival: ...


def save_planes(folder: Path, layout: Layout, run: RunState, progress: Progress) -> list[int]:
    """Write the file, durable on return; the checksum of each piece, as it was when it left the run."""
    checksums: list[int] = []

    def take(piece: Piece, buffer: Tensor, arrival: Arrival) -> None:
        arrival.wait()
        checksums.append(checksum(_bytes(buffer)))
        transfer("write", os.pwritev, file, piece.offset, _bytes(buffer))
        progress("save state", piece.offset + piece.nbytes, layout.nbytes)

    with _opened(folder / PLANES_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file, _buffers() as buffers:
        _allocate(file, layout.nbytes)
        flying: deque[tuple[Piece, Tensor, Arrival]] = deque()
        for number, piece in enumerate(layout.pieces()):
            if len(flying) == len(buffers):
                take(*flying.popleft())
            buffer = buffers[number % len(buffers)][: piece.nbytes]
            flying.append((piece, buffer, run.submit_read(piece, buffer)))
        while flying:
            take(*flying.popleft())
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return checksums


def verify_planes(folder: Path, manifest: Manifest, progress: Progress) -> int:
    """Read all of it; CheckpointError at the first piece that is another one. Returns the bytes read."""
    with opened_planes(folder, manifest) as file, _buffers() as buffers:
        for piece, expected in zip(manifest.layout.pieces(), manifest.checksums, strict=True):
            _read(file, manifest, piece, expected, buffers[0][: piece.nbytes])
            progress("verify state", piece.offset + piece.nbytes, manifest.layout.nbytes)
    return manifest.layout.nbytes


def load_planes(folder: Path, manifest: Manifest, run: RunState, progress: Progress) -> None:
    """All of it into a run that has not begun."""
    with opened_planes(folder, manifest) as file, _buffers() as buffers:
        flying: deque[Arrival] = deque()
        for number, (piece, expected) in enumerate(zip(manifest.layout.pieces(), manifest.checksums, strict=True)):
            if len(flying) == len(buffers):
                flying.popleft().wait()
            buffer = buffers[number % len(buffers)][: piece.nbytes]
            _read(file, manifest, piece, expected, buffer)
            flying.append(run.submit_write(piece, buffer))
            progress("load state", piece.offset + piece.nbytes, manifest.layout.nbytes)
        for arrival in flying:
            arrival.wait()


def read_piece(file: OpenFile, piece: Piece, into: Tensor) -> None:
    transfer("read", os.preadv, file, piece.offset, _bytes(into))


def read_range(file: OpenFile, offset: int, into: Tensor) -> None:
    """Bytes of the file, wherever pieces begin in it."""
    transfer("read", os.preadv, file, offset, _bytes(into))


def _read(file: OpenFile, manifest: Manifest, piece: Piece, expected: int, into: Tensor) -> None:
    read_piece(file, piece, into)
    if checksum(_bytes(into)) != expected:
        unit = manifest.layout.units[piece.unit].name
        plane = "frozen weights" if piece.plane < 0 else "weights" if piece.plane == 0 else f"plane {piece.plane} of its state"
        where = f"{file.path} at byte {piece.offset}, {piece.nbytes} bytes, unit {unit}, {plane}"
        raise CheckpointError(f"{where}: not what was written there. Go on from another checkpoint, or from the store")


@contextmanager
def opened_planes(folder: Path, manifest: Manifest) -> Iterator[OpenFile]:
    """The file of a checkpoint, of the size that it has to have."""
    path = folder / PLANES_NAME
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be read ({error.strerror})") from error
    if nbytes != manifest.layout.nbytes:
        raise CheckpointError(f"{path}: it has {nbytes} bytes, and should have {manifest.layout.nbytes}")
    with _opened(path, os.O_RDONLY) as file:
        yield file


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[OpenFile]:
    """Past the page cache where the filesystem can."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise StoreError("open", str(path), 0, 0, 0, error.errno, str(error.strerror)) from error
        descriptor = os.open(path, flags & ~os.O_EXCL, 0o600)  # which the first try may have made
    try:
        yield OpenFile(path, descriptor)
    finally:
        os.close(descriptor)


def _allocate(file: OpenFile, nbytes: int) -> None:
    try:
        if nbytes:
            os.posix_fallocate(file.fd, 0, nbytes)
    except OSError as error:
        raise StoreError("allocate", str(file.path), 0, nbytes, 0, error.errno, str(error.strerror)) from error


@contextmanager
def _buffers() -> Iterator[Sequence[Tensor]]:
    with closing(HostPool(NUM_BUFFERS * _BUFFER_BYTES)) as pool:
        pool.reserve(NUM_BUFFERS * _BUFFER_BYTES)
        yield [pool.allocate(_BUFFER_BYTES, f"piece {index}") for index in range(NUM_BUFFERS)]


def _bytes(buffer: Tensor) -> memoryview:
    return buffer.numpy().data
