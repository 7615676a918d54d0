"""Every store does what lohan/ssd/base.py says: the same tests over files on a drive and over memory, striped and not."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lohan.errors import ClosedError, StallError, StoreError
from lohan.host.pool import HostPool
from lohan.ssd.base import BLOCK_BYTES, Store, Ticket
from lohan.ssd.file_store import FileStore
from lohan.ssd.memory_store import MemoryStore
from lohan.ssd.striped import StripedStore
from lohan.ssd.stripes import Stripes
from lohan.ssd.throttle import Throttle

NUM_BLOCKS = 64
STRIPE_BYTES, CHUNK_BYTES = 4 * BLOCK_BYTES, 3 * BLOCK_BYTES  # neither divides the other: pieces end at both

OpenStore = Callable[..., StripedStore]


@pytest.fixture(params=["memory-1", "memory-3", "file-1", "file-2", "file-3"])
def open_store(request: pytest.FixtureRequest, drive: Path) -> Iterator[OpenStore]:
    """Opens stores of one kind, over as many files as its name says."""
    kind, num_files = request.param.split("-")
    with ExitStack() as stack:

        def open_one(*, threads: int = 2, stall_s: float = 25.0, throttle: Throttle | None = None) -> StripedStore:
            store: StripedStore
            nbytes = NUM_BLOCKS * BLOCK_BYTES
            if kind == "memory":
                store = MemoryStore(
                    nbytes,
                    num_files=int(num_files),
                    stripe_bytes=STRIPE_BYTES,
                    chunk_bytes=CHUNK_BYTES,
                    threads=threads,
                    stall_s=stall_s,
                    throttle=throttle,
                )
            else:
                store = FileStore.create(
                    [drive / f"drive-{file}" for file in range(int(num_files))],
                    nbytes,
                    stripe_bytes=STRIPE_BYTES,
                    chunk_bytes=CHUNK_BYTES,
                    threads=threads,
                    stall_s=stall_s,
                    throttle=throttle,
                )
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(2 * NUM_BLOCKS * BLOCK_BYTES)
    pool.reserve(2 * NUM_BLOCKS * BLOCK_BYTES)
    yield pool
    pool.close()


def blocks(pool: HostPool, num: int) -> Tensor:
    return pool.allocate(num * BLOCK_BYTES, "test")


def random_ranges(rng: random.Random) -> list[tuple[int, int]]:
    """Disjoint (address, size) ranges of the whole store, in any order, some of them missing."""
    cuts = sorted(rng.sample(range(NUM_BLOCKS + 1), rng.randint(2, 12)))
    ranges = [(a * BLOCK_BYTES, (b - a) * BLOCK_BYTES) for a, b in zip(cuts, cuts[1:], strict=False)]
    return rng.sample(ranges, rng.randint(1, len(ranges)))


def test_vectors_of_requests_do_what_a_bytearray_does(open_store: OpenStore, pool: HostPool) -> None:
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    store: Store = open_store()
    model = torch.zeros(NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    source, target = blocks(pool, NUM_BLOCKS), blocks(pool, NUM_BLOCKS)
    moved_bytes = 0
    for _ in range(25):
        written = random_ranges(rng)
        source.random_(0, 256, generator=generator)
        store.submit_write([(at, source[at : at + size]) for at, size in written]).wait()
        for at, size in written:
            model[at : at + size] = source[at : at + size]
            moved_bytes += size
        target.fill_(0xEE)
        wanted = torch.full_like(model, 0xEE)
        read = random_ranges(rng)
        tickets: list[Ticket] = [store.submit_read([(at, target[at : at + size])]) for at, size in read]
        for ticket in tickets:
            ticket.wait()
            assert ticket.done and ticket.started_s is not None and ticket.finished_s is not None
        for at, size in read:
            wanted[at : at + size] = model[at : at + size]
        assert torch.equal(target, wanted)
    store.flush()
    assert store.written_bytes == moved_bytes
    store.submit_read([(0, target)]).wait()
    assert torch.equal(target, model)


def test_no_requests_are_done_at_once(open_store: OpenStore) -> None:
    ticket = open_store().submit_read([])
    assert ticket.done
    ticket.wait()


@pytest.mark.parametrize("address, num_blocks", [(1, 1), (-BLOCK_BYTES, 1), ((NUM_BLOCKS - 1) * BLOCK_BYTES, 2)])
def test_addresses_outside_or_between_blocks_are_refused(
    open_store: OpenStore, pool: HostPool, address: int, num_blocks: int
) -> None:
    store = open_store()
    for submit in (store.submit_read, store.submit_write):
        with pytest.raises(StoreError) as caught:
            submit([(address, blocks(pool, num_blocks))])
        assert caught.value.offset == address


def test_buffers_that_cannot_be_transferred_are_refused(open_store: OpenStore, pool: HostPool) -> None:
    store, buffer = open_store(), blocks(pool, 8)
    wrong = {
        "must be contiguous uint8": [buffer.view(torch.int16), buffer.view(2, -1), buffer[::2]],
        "must be multiples": [buffer[: BLOCK_BYTES + 512], buffer[512 : 512 + BLOCK_BYTES]],
    }
    for reason, buffers in wrong.items():
        for refused in buffers:
            with pytest.raises(StoreError, match=reason):
                store.submit_read([(0, refused)])
    assert store.read_bytes == 0


def fail_at(monkeypatch: pytest.MonkeyPatch, store: StripedStore, action: str, failing: int) -> None:
    """Make the piece number `failing` of a direction fail."""
    real, numbers = getattr(store, f"{action}_piece"), itertools.count()

    def transfer(file: int, offset: int, buffer: memoryview) -> None:
        if next(numbers) == failing:
            raise StoreError(action, f"file {file}", offset, len(buffer), 0, 5, "made to fail")
        real(file, offset, buffer)

    monkeypatch.setattr(store, f"{action}_piece", transfer)


@pytest.mark.parametrize("action", ["read", "write"])
def test_an_error_in_the_middle_is_raised_once_nothing_runs_and_stays_with_its_ticket(
    open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    store, buffer = open_store(), blocks(pool, NUM_BLOCKS)
    fail_at(monkeypatch, store, action, failing=3)
    submit = store.submit_read if action == "read" else store.submit_write
    failed = submit([(0, buffer)])
    for _ in range(2):
        with pytest.raises(StoreError, match="made to fail"):
            failed.wait()
    submit([(0, buffer)]).wait()
    if action == "read":
        store.flush()
    else:
        for _ in range(2):  # the bytes that did not arrive are still missing
            with pytest.raises(StoreError, match="made to fail"):
                store.flush()


class Gate:
    """Holds the pieces of one direction until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: StripedStore, action: str) -> None:
        self.entered: list[int] = []
        self.reached, self.opened = threading.Event(), threading.Event()
        self._real = getattr(store, f"{action}_piece")
        monkeypatch.setattr(store, f"{action}_piece", self._transfer)

    def _transfer(self, file: int, offset: int, buffer: memoryview) -> None:
        self.entered.append(offset)
        self.reached.set()
        assert self.opened.wait(30)
        self._real(file, offset, buffer)


def test_a_failed_ticket_is_done_when_nothing_of_it_runs_and_starts_nothing_more(
    open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, buffer = open_store(threads=2), blocks(pool, NUM_BLOCKS)
    failed, opened, numbers = threading.Event(), threading.Event(), itertools.count()

    def first_hangs_second_fails(file: int, offset: int, view: memoryview) -> None:
        if next(numbers) == 0:
            assert opened.wait(30)
        else:
            failed.set()
            raise StoreError("read", f"file {file}", offset, len(view), 0, 5, "made to fail")

    monkeypatch.setattr(store, "read_piece", first_hangs_second_fails)
    ticket = store.submit_read([(0, buffer)])
    assert failed.wait(30)
    with pytest.raises(TimeoutError):
        ticket.wait(timeout_s=0.1)
    opened.set()
    with pytest.raises(StoreError, match="made to fail"):
        ticket.wait()
    assert next(numbers) <= 2 * len(store._read_lanes), "one piece per thread at most"


def test_pieces_start_in_the_order_of_submission(
    open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, buffer = open_store(threads=1), blocks(pool, NUM_BLOCKS)
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(store, "read_piece", lambda file, offset, view: started.append((file, offset)))
    order = random.Random(2).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tickets = [store.submit_read([(n * BLOCK_BYTES, buffer[:BLOCK_BYTES])]) for n in order]
    for ticket in tickets:
        ticket.wait()
    stripes = Stripes(len(store._read_lanes), STRIPE_BYTES, CHUNK_BYTES)
    wanted = [(span.file, span.offset) for n in order for span in stripes.split(n * BLOCK_BYTES, BLOCK_BYTES)]
    for file in range(stripes.num_files):
        assert [place for place in started if place[0] == file] == [place for place in wanted if place[0] == file]


def test_a_write_never_delays_a_read(open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, buffer = open_store(), blocks(pool, NUM_BLOCKS)
    gate = Gate(monkeypatch, store, "write")
    written = store.submit_write([(0, buffer)])
    store.submit_read([(0, blocks(pool, NUM_BLOCKS))]).wait()
    assert not written.done
    gate.opened.set()
    written.wait()


def test_a_transfer_that_never_ends_is_a_stall_and_the_callers_own_limit_is_not(
    open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, buffer = open_store(stall_s=0.5), blocks(pool, NUM_BLOCKS)
    gate = Gate(monkeypatch, store, "read")
    ticket = store.submit_read([(0, buffer)])
    with pytest.raises(TimeoutError) as caught:
        ticket.wait(timeout_s=0.05)
    assert not isinstance(caught.value, StallError)
    with pytest.raises(StallError, match="none of the store finished for 0.5 s"):
        ticket.wait()
    gate.opened.set()
    ticket.wait()


def test_a_slow_drive_is_no_stall(open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, buffer = open_store(stall_s=0.5, threads=1), blocks(pool, NUM_BLOCKS // 2)
    pause = threading.Event()
    monkeypatch.setattr(store, "read_piece", lambda *piece: pause.wait(0.1))
    ticket = store.submit_read([(0, buffer)])
    ticket.wait()
    assert ticket.started_s is not None and ticket.finished_s is not None
    assert ticket.finished_s - ticket.started_s > 0.5, "longer than a stall in all, or this test shows nothing"


def test_closing_finishes_what_runs_and_fails_the_rest(
    open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, buffer = open_store(threads=1), blocks(pool, NUM_BLOCKS)
    source = blocks(pool, 1).fill_(7)
    store.submit_write([(0, source)]).wait()
    gate = Gate(monkeypatch, store, "read")
    running = store.submit_read([(0, buffer[:BLOCK_BYTES])])
    assert gate.reached.wait(30)
    waiting = store.submit_read([(0, buffer)])
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._closed:
        pass
    with pytest.raises(ClosedError):
        store.submit_read([(0, buffer)])
    gate.opened.set()
    closing.join(30)
    assert not closing.is_alive()
    running.wait()
    assert bool((buffer[:BLOCK_BYTES] == 7).all())
    with pytest.raises(ClosedError):
        waiting.wait()
    for call in (lambda: store.submit_write([(0, buffer)]), store.flush):
        with pytest.raises(ClosedError):
            call()
    store.close()


def test_closing_does_not_wait_forever(open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(stall_s=0.2)
    gate = Gate(monkeypatch, store, "write")
    ticket = store.submit_write([(0, blocks(pool, 1))])
    assert gate.reached.wait(30)
    with pytest.raises(StallError, match="closing the store"):
        store.close()
    gate.opened.set()
    ticket.wait()


def test_a_throttle_paces_each_direction_as_a_whole(
    open_store: OpenStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_until: list[float] = []
    monkeypatch.setattr("lohan.ssd.lanes.sleep_until", slept_until.append)
    store, buffer = open_store(throttle=Throttle(read_gbps=1e-3)), blocks(pool, NUM_BLOCKS)
    ticket = store.submit_read([(0, buffer)])
    ticket.wait()
    assert ticket.started_s is not None
    assert max(slept_until) - ticket.started_s > buffer.numel() / 1e6 - 1e-6
    assert max(slept_until) - min(slept_until) > (buffer.numel() - CHUNK_BYTES) / 1e6 - 1e-6
