"""Keeps the C library's heap from holding what the model's operations have freed.

Torch takes the memory of every tensor from malloc. glibc reuses what aligned allocations leave only in part: after a few units
of a model, a heap of which 240 MB were ever in use at once has grown to 1.8 GB. So between units, when the process has grown
by more than that is worth, free pages go back to the system.

What it is worth: pages that go back are cleared when they come again. Given back after every unit of a model with 374M
parameters, 4 x 512 tokens (workspace 125 MiB, slack 64 MiB), they cost 14% of a step; with a slack of 192 MiB 2%, of 256 MiB
nothing; and the peak was the same within 5%, as the operations of a unit take what the last one's left. Twice the
workspace took 1.1B, 4 x 512 tokens, to the very limit of its cgroup of 2.5 GiB in the export, so it is one.
"""

from __future__ import annotations

import ctypes
import os

from lohan.host.memory import resident_bytes

SLACK_BYTES = 64 * 2**20
WORKSPACES = 1
"""by so many bytes and workspaces the process may grow before its free pages are given back"""


def use_huge_pages() -> None:
    """Ask torch for huge pages behind its large tensors. It looks once, at its first allocation."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class Heap:
    """The heap of this process, where the C library is glibc; elsewhere it is left alone.

    How much of a heap is free, glibc cannot say usefully: pages that were given back count as free for ever. So what decides
    is by how much the process has grown since the last time.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._floor_bytes = resident_bytes()
        self._slack_bytes = SLACK_BYTES

    def keep_for(self, workspace_bytes: int) -> None:
        """What the operations of one unit hold at most."""
        self._slack_bytes = SLACK_BYTES + WORKSPACES * workspace_bytes

    def release(self, slack_bytes: int | None = None) -> bool:
        """Give free pages back to the system if the process has grown by more than the slack; whether it was done."""
        slack_bytes = self._slack_bytes if slack_bytes is None else slack_bytes
        now_bytes = resident_bytes()
        self._floor_bytes = min(self._floor_bytes, now_bytes)
        if self._trim is None or now_bytes - self._floor_bytes <= slack_bytes:
            return False
        self._trim(0)
        self._floor_bytes = resident_bytes()
        return True
