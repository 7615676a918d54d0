"""What a store is: one flat space of bytes that outlives RAM, read and written by vectors of requests.

    ticket = store.submit_read([(address, buffer), ...])    returns at once; the buffers belong to the store
    ticket.wait()                                           raises what went wrong; the buffers belong to the caller again
    ...
    store.submit_write([(address, buffer), ...]).wait()     the bytes are with the drive
    store.flush()                                           the bytes of every finished write survive a power cut

Requests are cut into pieces that run on threads. Pieces of one drive and direction start in the order of submission and
finish in any: what must follow a request waits for its ticket. Two requests in flight that touch the same bytes, one of them
writing, are the caller's error. Addresses, sizes and the buffers' own addresses are multiples of BLOCK_BYTES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

BLOCK_BYTES = 4096
"""the grain of addresses and sizes: what O_DIRECT asks for on every drive in use"""

Request = tuple[int, Tensor]
"""a logical address, and a uint8 tensor [n] in host memory that is read into or written from"""


class Ticket(Protocol):
    """One vector of requests on its way."""

    @property
    def done(self) -> bool:
        """Whether all of it finished or failed: `wait` does not block any more."""

    @property
    def started_s(self) -> float | None:
        """When its first piece started, on the clock of `time.perf_counter`."""

    @property
    def finished_s(self) -> float | None:
        """When its last piece finished."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all of it is done, after which no piece touches a buffer.

        StoreError: what the first piece to fail met. ClosedError: the store was closed before all of it had started.
        StallError: no piece of the whole store finished for too long (a slow drive is no error); TimeoutError: the caller's
        own limit passed. After these two the buffers still belong to the store.
        """


class Store(Protocol):
    """A flat space of `nbytes` bytes."""

    @property
    def nbytes(self) -> int: ...

    @property
    def read_bytes(self) -> int:
        """Bytes of all reads that finished."""

    @property
    def written_bytes(self) -> int:
        """Bytes of all writes that finished."""

    def locate(self, address: int) -> tuple[str, int]:
        """The file that holds a byte, and where in it: for people."""

    def submit_read(self, requests: Sequence[Request]) -> Ticket: ...

    def submit_write(self, requests: Sequence[Request]) -> Ticket: ...

    def flush(self) -> None:
        """Make every write whose ticket is done durable. Raises the first error that any write or flush ever met."""

    def close(self) -> None:
        """Let running pieces finish, fail those that have not started with ClosedError, and release the store."""
