"""What all stores share: requests in, checked, cut into pieces, put on the lanes of the files that they lie in."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lohan.errors import ClosedError, StallError, StoreError
from lohan.ssd.base import BLOCK_BYTES, Request
from lohan.ssd.lanes import Lane, Piece, PieceTicket, Progress
from lohan.ssd.stripes import Stripes
from lohan.ssd.throttle import Pacer, Throttle

STRIPE_BYTES = 16 * 2**20
CHUNK_BYTES = 16 * 2**20
NUM_THREADS = 4
"""per file and direction. An idle process needs no more than two threads and 8 MiB, but a thread waits up to 5 ms for the GIL
while another computes in Python: reads then reach 1.6 GB/s of 3.9 with 2 x 8 MiB, 1.9 with 2 x 16, 2.7 with 4 x 16."""
STALL_S = 25.0

_Transfer = Callable[[int, int, memoryview], None]


class StripedStore(ABC):
    """A store over equal files; a subclass says how one piece of one file is read, written and made durable.

    `read_piece`, `write_piece` and `sync_file` run on lane threads, several at a time, and either do all of it or raise.
    """

    def __init__(self, nbytes: int, stripes: Stripes, *, threads: int, stall_s: float, throttle: Throttle | None) -> None:
        if threads <= 0:
            raise ValueError(f"threads={threads}: must be positive")
        rates = throttle or Throttle()
        read_pacer, write_pacer = Pacer(rates.read_gbps), Pacer(rates.write_gbps)
        files = range(stripes.num_files)
        self._nbytes = nbytes
        self._stripes = stripes
        self._progress = Progress(stall_s)
        self._read_lanes: list[Lane] = []
        self._write_lanes: list[Lane] = []
        try:
            for file in files:
                self._read_lanes.append(Lane(f"ssd-read-{file}", threads, read_pacer))
                self._write_lanes.append(Lane(f"ssd-write-{file}", threads, write_pacer))
        except BaseException:  # a thread that cannot begin: the others end
            for lane in [*self._read_lanes, *self._write_lanes]:
                lane.close()
            raise
        self._write_error: BaseException | None = None
        self._closed = False
        self._submit_lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def read_bytes(self) -> int:
        return sum(lane.moved_bytes for lane in self._read_lanes)

    @property
    def written_bytes(self) -> int:
        return sum(lane.moved_bytes for lane in self._write_lanes)

    def locate(self, address: int) -> tuple[str, int]:
        span = next(self._stripes.split(address, 1))
        return self.file_name(span.file), span.offset

    def submit_read(self, requests: Sequence[Request]) -> PieceTicket:
        return self._submit("read", requests, self._read_lanes, self.read_piece)

    def submit_write(self, requests: Sequence[Request]) -> PieceTicket:
        return self._submit("write", requests, self._write_lanes, self._write_remembered)

    def flush(self) -> None:
        syncs = [(lane, 0, partial(self._sync_remembered, file)) for file, lane in enumerate(self._write_lanes)]
        self._put("flush", syncs).wait()

    def close(self) -> None:
        with self._submit_lock:
            if self._closed:
                return
            self._closed = True
            lanes = [*self._read_lanes, *self._write_lanes]
            for lane in lanes:
                lane.close()
        patience_s = 0.0 if self._progress.is_stalled else self._progress.stall_s
        until_s = time.perf_counter() + patience_s
        if not all([lane.join(until_s) for lane in lanes]):
            # The files stay open: a thread that comes back must not find another file under the same number.
            raise StallError(f"a transfer did not finish within {patience_s:g} s of closing the store")
        self.release()

    @abstractmethod
    def read_piece(self, file: int, offset: int, buffer: memoryview) -> None: ...

    @abstractmethod
    def write_piece(self, file: int, offset: int, buffer: memoryview) -> None: ...

    @abstractmethod
    def sync_file(self, file: int) -> None: ...

    def file_name(self, file: int) -> str:
        return f"file {file}"

    @abstractmethod
    def release(self) -> None:
        """Let go of the files; no lane runs any more."""

    def _submit(self, action: str, requests: Sequence[Request], lanes: Sequence[Lane], transfer: _Transfer) -> PieceTicket:
        transfers: list[tuple[Lane, int, Callable[[], None]]] = []
        for address, buffer in requests:
            view = self._check(action, address, buffer)
            for file, offset, start, nbytes in self._stripes.split(address, len(view)):
                transfers.append((lanes[file], nbytes, partial(transfer, file, offset, view[start : start + nbytes])))
        return self._put(f"{action} of {len(requests)} requests", transfers)

    def _put(self, what: str, transfers: Sequence[tuple[Lane, int, Callable[[], None]]]) -> PieceTicket:
        ticket = PieceTicket(what, len(transfers), self._progress)
        with self._submit_lock:
            if self._closed:
                raise ClosedError(f"{what}: the store is closed")
            for lane, nbytes, transfer in transfers:
                lane.put(Piece(ticket, nbytes, transfer))
        return ticket

    def _check(self, action: str, address: int, buffer: Tensor) -> memoryview:
        """The bytes of a buffer that O_DIRECT can use, at an address that is inside the store."""
        nbytes = buffer.numel()
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device.type != "cpu":
            found = f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}"
            reason = f"the buffer must be contiguous uint8 [n] in host memory, not {found}"
        elif address % BLOCK_BYTES or nbytes % BLOCK_BYTES or buffer.data_ptr() % BLOCK_BYTES:
            reason = f"address, size and buffer ({buffer.data_ptr():#x}) must be multiples of {BLOCK_BYTES}"
        elif address < 0 or address + nbytes > self._nbytes:
            reason = f"outside the store's {self._nbytes} bytes"
        else:
            return buffer.numpy().data
        raise StoreError(action, "store", address, nbytes, 0, None, reason)

    def _write_remembered(self, file: int, offset: int, buffer: memoryview) -> None:
        try:
            self.write_piece(file, offset, buffer)
        except BaseException as error:
            self._write_error = self._write_error or error
            raise

    def _sync_remembered(self, file: int) -> None:
        # After a failed fsync the kernel forgets the pages that failed: a second one would succeed and mean nothing.
        try:
            if self._write_error is None:
                self.sync_file(file)
        except BaseException as error:
            self._write_error = self._write_error or error
        if self._write_error is not None:
            raise self._write_error
