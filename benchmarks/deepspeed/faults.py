"""A tensor to a file and back through DeepSpeed's AsyncIO, with a pause in between for whoever breaks the drive.

    .bench/deepspeed-venv/bin/python benchmarks/deepspeed/faults.py FILE NBYTES PAUSE      PAUSE: before, after or never

It is used as DeepSpeed's own swapping uses it: requests are submitted, and `wait` must return how many there were.
`versus_faults.py` starts it. It says `paused` and waits for a line on standard input; what came of the write and of the read
are JSON objects.
"""

from __future__ import annotations

import json
import sys

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder


def main() -> None:
    path, nbytes, pause = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    handle = AsyncIOBuilder().load().aio_handle(2**20, 8, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.copy_(torch.arange(nbytes // 8).view(torch.uint8))
    expected = buffer.clone()
    if pause == "before":
        wait_for_the_fault()
    print(json.dumps({"write": attempt(handle, handle.async_pwrite, buffer, path)}), flush=True)
    if pause == "after":
        wait_for_the_fault()
    buffer.zero_()
    read = attempt(handle, handle.async_pread, buffer, path)
    print(json.dumps({"read": read, "is_right": bool(torch.equal(buffer, expected))}), flush=True)


def wait_for_the_fault() -> None:
    print("paused", flush=True)
    sys.stdin.readline()


def attempt(handle: object, submit: object, buffer: torch.Tensor, path: str) -> str:
    """`done`, or what was raised."""
    try:
        submitted = submit(buffer, path, 0)  # type: ignore[operator]
        completed = handle.wait()  # type: ignore[attr-defined]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done" if completed == 1 and submitted in (0, 1) else f"submit returned {submitted}, wait {completed}"


if __name__ == "__main__":
    main()
