"""The same faults for DeepSpeed's AsyncIO and for lohan's store: who notices?

    benchmarks/deepspeed/setup.sh                        once; needs libaio-dev
    python benchmarks/versus_faults.py                   needs root: loop disks

A tensor is written to a drive and read back. The faults: the filesystem fails every read (EIO) after the write, fails every
write, is too small, or a bit flips between writing and reading. The table has what each library says of the write and of the
read, and whether the bytes are right: `done` with wrong bytes is what nobody would have noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from models import BENCH_DIR
from quiet import quiet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lohan.host.pool import HostPool  # noqa: E402
from lohan.ssd.checked import CheckedStore, Extent  # noqa: E402
from lohan.ssd.file_store import FileStore  # noqa: E402
from tests.faults.linux import Disk, disk  # noqa: E402  (they are the same disks)

HERE = Path(__file__).resolve().parent
NBYTES, DISK_BYTES, SMALL_DISK_BYTES = 64 * 2**20, 160 * 2**20, 48 * 2**20
OUTER_BYTES = 300 * 2**20
"""the disk in whose file the disk lies that is used: without power it fails every transfer of the other"""
Told = dict[str, object]


def nothing(outer: Disk, file: Path) -> None: ...


def break_drive(outer: Disk, file: Path) -> None:
    """From now on every transfer is EIO, as of a drive that died; names and sizes are still known."""
    os.sync()
    outer.cut_power()


def flip_a_bit(outer: Disk, file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(NBYTES // 2)
        byte = opened.read(1)[0]
        opened.seek(NBYTES // 2)
        opened.write(bytes([byte ^ 16]))


FAULTS: dict[str, tuple[str, int, Callable[[Disk, Path], None]]] = {
    "no fault": ("never", DISK_BYTES, nothing),
    "read error": ("after", DISK_BYTES, break_drive),
    "write error": ("before", DISK_BYTES, break_drive),
    "full disk": ("never", SMALL_DISK_BYTES, nothing),
    "flipped bit": ("after", DISK_BYTES, flip_a_bit),
}


def ask_deepspeed(python: Path, name: str, outer: Disk, drive: Disk) -> Told:
    pause, _, fault = FAULTS[name]
    file = drive.at / "tensor"
    with file.open("wb") as opened:
        if name != "full disk":
            os.posix_fallocate(opened.fileno(), 0, NBYTES)
    command = [str(python), str(HERE / "deepspeed" / "faults.py"), str(file), str(NBYTES), pause]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        told: Told = {"write": "", "read": "", "is_right": False}
        for line in process.stdout:
            if line == "paused\n":
                fault(outer, file)
                process.stdin.write("\n")
                process.stdin.flush()
            elif line.startswith("{"):
                told |= json.loads(line)
        unsaid = next((key for key in ("write", "read") if not told[key]), None)
        if unsaid is not None:
            last = next((line for line in reversed(process.stderr.read().splitlines()) if line.strip()), "")
            told[unsaid] = f"the process ended: {last.split(': ', 2)[-1]}"
        return told


def ask_lohan(name: str, outer: Disk, drive: Disk) -> Told:
    pause, _, fault = FAULTS[name]
    pool = HostPool(2 * NBYTES)
    pool.reserve(2 * NBYTES)
    buffer, expected = pool.allocate(NBYTES, "tensor"), pool.allocate(NBYTES, "copy")
    for one in (buffer, expected):
        one.copy_(torch.arange(NBYTES // 8).view(torch.uint8))
    told: Told = {"write": "", "read": "", "is_right": False}
    try:
        store = CheckedStore(FileStore.create([drive.at / "lohan"], NBYTES), [Extent("tensor", 0, NBYTES, 2**20)])
    except Exception as error:
        return {**told, "write": f"refused before: {error}"}
    if pause == "before":
        fault(outer, drive.at / "lohan" / "store")
    told["write"] = attempt(lambda: store.submit_write([(0, buffer)]).wait())
    if pause == "after":
        fault(outer, drive.at / "lohan" / "store")
    buffer.zero_()
    told["read"] = attempt(lambda: store.submit_read([(0, buffer)]).wait())
    told["is_right"] = bool(torch.equal(buffer, expected))
    attempt(store.close)
    return told


def attempt(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=BENCH_DIR)
    parser.add_argument("--deepspeed", type=Path, default=BENCH_DIR / "deepspeed-venv" / "bin" / "python")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    print("| fault | library | write | read | bytes | noticed |\n|---|---|---|---|---|---|")
    for name, (_, nbytes, _) in FAULTS.items():
        for library in ("DeepSpeed", "lohan"):
            with (
                tempfile.TemporaryDirectory(dir=options.dir) as folder,
                disk(Path(folder), OUTER_BYTES, "outer") as outer,
                disk(outer.at, nbytes) as drive,
            ):
                is_theirs = library == "DeepSpeed"
                told = ask_deepspeed(options.deepspeed, name, outer, drive) if is_theirs else ask_lohan(name, outer, drive)
            is_noticed = name == "no fault" or not told["is_right"] and (told["write"], told["read"]) != ("done", "done")
            told = {key: str(value).replace(folder, "")[:160] for key, value in told.items()}
            right = "right" if told["is_right"] == "True" else "wrong"
            print(
                f"| {name} | {library} | {told['write']} | {told['read']} | {right} | {'yes' if is_noticed else 'NO'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
