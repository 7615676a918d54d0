"""Files as a store: what the kernel may answer, where files may be made, and what is left when that fails."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lohan.errors import OptionError, StoreError
from lohan.host.pool import HostPool
from lohan.ssd.base import BLOCK_BYTES
from lohan.ssd.file_store import MAX_FRUITLESS, FileStore

NBYTES = 16 * BLOCK_BYTES
CHUNK_BYTES = 8 * BLOCK_BYTES


@pytest.fixture
def store(drive: Path) -> Iterator[FileStore]:
    store = FileStore.create([drive / "store"], NBYTES, chunk_bytes=CHUNK_BYTES, threads=1)
    yield store
    store.close()


@pytest.fixture
def buffers() -> Iterator[tuple[Tensor, Tensor]]:
    """Random bytes, and as many that are all 0xEE."""
    pool = HostPool(2 * NBYTES)
    source, target = pool.allocate(NBYTES, "source"), pool.allocate(NBYTES, "target")
    yield source.random_(0, 256, generator=torch.Generator().manual_seed(3)), target.fill_(0xEE)
    pool.close()


def answer(monkeypatch: pytest.MonkeyPatch, call: str, *answers: int | OSError | None) -> list[int]:
    """Let the calls to os.`call` answer in turn: a count moves the blocks it reaches into and is reported; None is honest."""
    real, left, offsets = getattr(os, call), list(answers), []

    def faulty(fd: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        told = left.pop(0) if left else None
        if told is None:
            return real(fd, views, offset)
        if isinstance(told, OSError):
            raise told
        real(fd, [views[0][: -(-told // BLOCK_BYTES) * BLOCK_BYTES]], offset)
        return told

    monkeypatch.setattr(os, call, faulty)
    return offsets


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize(
    "answers, offsets",
    [
        ([BLOCK_BYTES], [0, BLOCK_BYTES]),
        ([BLOCK_BYTES, 3 * BLOCK_BYTES], [0, BLOCK_BYTES, 4 * BLOCK_BYTES]),
        ([100], [0, 0]),
        ([BLOCK_BYTES + 100], [0, BLOCK_BYTES]),
        ([100, 100, BLOCK_BYTES, 100, 100], [0, 0, 0, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES]),
        ([InterruptedError(errno.EINTR, "interrupted")], [0, 0]),
    ],
)
def test_short_transfers_are_continued_at_whole_blocks(
    store: FileStore,
    buffers: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    answers: list[int],
    offsets: list[int],
) -> None:
    source, target = buffers
    seen = answer(monkeypatch, call, *answers)
    store.submit_write([(0, source)]).wait()
    store.submit_read([(0, target)]).wait()
    assert torch.equal(source, target)
    assert seen == [*offsets, CHUNK_BYTES], "the second piece is honest"


@pytest.mark.parametrize("call, action", [("preadv", "read"), ("pwritev", "write")])
@pytest.mark.parametrize(
    "answers, got, code",
    [
        ([OSError(errno.EIO, "bad sector")], 0, errno.EIO),
        ([BLOCK_BYTES, OSError(errno.EIO, "bad sector")], BLOCK_BYTES, errno.EIO),
        ([BLOCK_BYTES, 0], BLOCK_BYTES, None),
        ([2 * BLOCK_BYTES] + [100] * MAX_FRUITLESS, 2 * BLOCK_BYTES, None),
    ],
)
def test_what_cannot_be_completed_says_where(
    store: FileStore,
    buffers: tuple[Tensor, Tensor],
    drive: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    action: str,
    answers: list[int | OSError],
    got: int,
    code: int | None,
) -> None:
    answer(monkeypatch, call, None, *answers)  # the first piece is honest
    submit = store.submit_read if action == "read" else store.submit_write
    with pytest.raises(StoreError) as caught:
        submit([(0, buffers[0])]).wait()
    error = caught.value
    assert (error.action, error.path) == (action, str(drive / "store" / "store"))
    assert (error.offset, error.wanted, error.got, error.code) == (CHUNK_BYTES, CHUNK_BYTES, got, code)
    assert str(error.offset) in str(error) and error.path in str(error)


def test_a_file_that_became_shorter_is_an_error_and_no_zeros(store: FileStore, buffers: tuple[Tensor, Tensor]) -> None:
    os.truncate(store._files[0].path, CHUNK_BYTES + BLOCK_BYTES)
    with pytest.raises(StoreError, match="wanted 32768 bytes, got 4096.*the file ends here"):
        store.submit_read([(0, buffers[1])]).wait()


def test_a_flush_that_failed_is_never_believed_again(
    store: FileStore, buffers: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fail_once(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 1:
            raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fdatasync", fail_once)
    for _ in range(2):
        with pytest.raises(StoreError, match="flush .*lost"):
            store.flush()
    assert len(synced) == 1
    store.submit_read([(0, buffers[1])]).wait()


def test_a_flush_reaches_every_file(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore.create([drive / "a", drive / "b", drive / "c"], NBYTES)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    store.flush()
    assert sorted(synced) == sorted(file.fd for file in store._files) and len(set(synced)) == 3
    store.close()


def test_files_are_private_allocated_and_direct(drive: Path) -> None:
    folders = [drive / "deep" / "a", drive / "b"]
    store = FileStore.create(folders, 5 * BLOCK_BYTES, stripe_bytes=2 * BLOCK_BYTES, file_name="state")
    for folder, file in zip(folders, store._files, strict=True):
        status = (folder / "state").stat()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 4 * BLOCK_BYTES and status.st_blocks * 512 >= status.st_size
        assert fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
        assert not os.get_inheritable(file.fd)
    store.close()


def test_what_an_earlier_run_left_is_replaced(drive: Path, buffers: tuple[Tensor, Tensor]) -> None:
    source, target = buffers
    (drive / "store").write_bytes(b"\x01" * 2 * NBYTES)
    store = FileStore.create([drive], NBYTES)
    status = (drive / "store").stat()
    assert status.st_size == NBYTES and stat.S_IMODE(status.st_mode) == 0o600
    store.submit_read([(0, target)]).wait()
    assert not target.any()
    store.close()


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_a_spill_file_has_no_name(drive: Path, monkeypatch: pytest.MonkeyPatch, has_tmpfile: bool) -> None:
    real = os.open

    def without_tmpfile(path: str | Path, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not has_tmpfile:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    stores = [FileStore.create([drive], NBYTES, unlinked=True) for _ in range(2)]
    assert not list(drive.iterdir())
    for store in stores:
        assert os.fstat(store._files[0].fd).st_nlink == 0
        store.close()


def refused(folder: Path, reason: str, nbytes: int = NBYTES) -> OptionError:
    with pytest.raises(OptionError, match=reason) as caught:
        FileStore.create([folder], nbytes)
    assert str(caught.value).startswith(f"ssd={str(folder)!r}: ")
    return caught.value


def test_memory_is_no_drive() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    folder = Path("/dev/shm/lohan-test-store")
    try:
        refused(folder, "is on tmpfs, which is RAM")
    finally:
        folder.rmdir()


def test_too_little_space_names_both_sizes_and_touches_nothing(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(fd: int, offset: int, nbytes: int) -> None:
        raise AssertionError("what others need is taken, if only for a moment")

    monkeypatch.setattr(os, "posix_fallocate", fill_the_disk)
    free = os.statvfs(drive)
    nbytes = (free.f_bavail * free.f_frsize // BLOCK_BYTES + 2**20) * BLOCK_BYTES
    refused(drive, rf"{nbytes} bytes are needed, \d+ are free", nbytes)
    assert not list(drive.iterdir())


def test_a_disk_that_fills_up_meanwhile_is_told_the_same(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    refused(drive, rf"{NBYTES} bytes are needed, \d+ are free \(No space left on device\)")
    assert not list(drive.iterdir())


def test_folders_that_others_could_reach_are_refused(drive: Path) -> None:
    (drive / "link").symlink_to(drive)
    refused(drive / "link", "is a link, not a folder")
    (drive / "open").mkdir()
    (drive / "open").chmod(0o770)
    refused(drive / "open", "is writable by other users")
    (drive / "store").symlink_to("/dev/null")
    refused(drive, "no file can be opened there")
    if os.geteuid() == 0:
        (drive / "theirs").mkdir()
        os.chown(drive / "theirs", 12345, 12345)
        refused(drive / "theirs", "belongs to user 12345")


def test_folders_that_cannot_be_made_are_refused(drive: Path) -> None:
    refused(Path("/proc/lohan"), "cannot be made")
    (drive / "file").write_text("")
    refused(drive / "file", "cannot be made")


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_filesystem_without_direct_io_is_refused(drive: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real: Callable[..., int] = getattr(os, call)

    def refuse(*args: object) -> int:
        if call == "preadv" or int(args[1]) & os.O_DIRECT:  # type: ignore[call-overload]
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*args)

    monkeypatch.setattr(os, call, refuse)
    refused(drive, "O_DIRECT")
    assert not list(drive.iterdir())


def test_one_folder_is_one_drive(drive: Path) -> None:
    with pytest.raises(OptionError, match="named twice"):
        FileStore.create([drive, f"{drive}/"], NBYTES)
    with pytest.raises(OptionError, match="needs a folder"):
        FileStore.create([], NBYTES)


def test_a_second_drive_that_fails_leaves_nothing_on_the_first(drive: Path) -> None:
    with pytest.raises(OptionError, match="cannot be made"):
        FileStore.create([drive / "a", "/proc/lohan"], NBYTES)
    assert not list((drive / "a").iterdir())


def test_two_processes_do_not_share_a_store(drive: Path) -> None:
    command = "import sys; from lohan.ssd.file_store import FileStore; FileStore.create([sys.argv[1]], 4096)"
    store = FileStore.create([drive], NBYTES)
    other = subprocess.run([sys.executable, "-c", command, str(drive)], capture_output=True, text=True)
    assert other.returncode != 0 and "in use by another process" in other.stderr
    assert (drive / "store").stat().st_size == NBYTES, "the file that is in use is untouched"
    store.close()
    FileStore.create([drive], NBYTES).close()
