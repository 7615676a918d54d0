"""How fast the host and a device compute and move bytes: short measurements, each a median of rounds.

Everything goes through what training uses: the native kernels, the device protocol. So the emulated device can be measured as
well as a GPU, which is how the tests do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from lohan.device.protocol import Device
from lohan.host.pool import HostPool
from lohan.machine.machine import GpuRates, HostRates
from lohan.optim.adamw import AdamW
from lohan.optim.base import Part
from lohan.optim.team import PART_ELEMENTS
from lohan.schedule.ops import Lane

Told = TypeVar("Told")
COPY_BYTES = 256 * 2**20
NUM_PARAMETERS = 8 * 2**20
"""updated in one round: 144 MB, more than any cache holds"""
HOST_MATMUL, DEVICE_MATMUL = 1024, 4096
"""rows and columns of the matrices that are multiplied"""
ROUNDS = 5
MATMUL_S = 0.3
NUM_COPIES = 8


def host_rates(cores: int) -> HostRates:
    """All of the host's."""
    one, everyone = adamw_per_s(1), adamw_per_s(cores) if cores > 1 else None
    return HostRates(memory_gbps(), host_flops(), one, everyone or one)


def num_threads() -> int:
    """That torch computes on."""
    return torch.get_num_threads()


def memory_gbps(nbytes: int = COPY_BYTES) -> float:
    """Bytes read and written, of a copy on torch's threads."""
    with closing(HostPool(2 * nbytes)) as pool:
        target, source = pool.allocate(nbytes, "target"), pool.allocate(nbytes, "source")
        return 2 * nbytes / _seconds(lambda: target.copy_(source)) / 1e9


def host_flops(size: int = HOST_MATMUL) -> float:
    """Of bf16 matrix products on torch's threads."""
    left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right)


def adamw_per_s(threads: int, num: int = NUM_PARAMETERS) -> float:
    """Parameters that AdamW updates on so many threads: split masters, in the parts that a team works on."""
    with closing(HostPool(num * 14 + 5 * 4096)) as pool, ThreadPoolExecutor(threads) as executor:
        weight, gradient = (pool.allocate(2 * num, name).view(torch.bfloat16) for name in ("weight", "gradient"))
        rest = pool.allocate(2 * num, "rest").view(torch.int16)
        state = [pool.allocate(4 * num, name).view(torch.float32) for name in ("mean", "square")]
        gradient.normal_()
        optimizer = AdamW()

        def update(first: int) -> None:
            part = slice(first, min(first + PART_ELEMENTS, num))
            planes = [plane[part] for plane in state]
            whole = Part(0, part.stop - part.start, 0.01)
            optimizer.update(weight[part], rest[part], gradient[part], planes, step=10, lr=1e-5, clip=0.5, parts=[whole])

        firsts = range(0, num, PART_ELEMENTS)
        return num / _seconds(lambda: list(executor.map(update, firsts)))


def gpu_rates(
    device: Device, name: str, during: Callable[[], Told], *, copy_bytes: int = COPY_BYTES, matmul: int = DEVICE_MATMUL
) -> tuple[GpuRates, Told]:
    """A device's copies each way and its matrix products; `during` is called while copies are under way."""
    with closing(HostPool(copy_bytes)) as pool:
        host, slab = pool.allocate(copy_bytes, "copied"), device.allocate(copy_bytes, "copied")
        for arena in pool.arenas:
            device.register(arena)
        told: list[Told] = []

        def copy(lane: Lane) -> None:
            target, source = (slab, host) if lane is Lane.UPLOAD else (host, slab)
            for _ in range(NUM_COPIES):
                device.copy(lane, target, source)
            event = device.event(lane)
            device.record(lane, event)
            if lane is Lane.UPLOAD:
                told.append(during())
            device.synchronize(event)

        times_s = [_seconds(partial(copy, lane)) for lane in (Lane.UPLOAD, Lane.DOWNLOAD)]
        for arena in pool.arenas:
            device.unregister(arena)
    upload_gbps, download_gbps = (NUM_COPIES * copy_bytes / time_s / 1e9 for time_s in times_s)
    return GpuRates(name, device.memory_bytes, upload_gbps, download_gbps, device_flops(device, matmul)), told[-1]


def device_flops(device: Device, size: int = DEVICE_MATMUL) -> float:
    """Of bf16 matrix products, enqueued one behind the other."""
    left, right = (device.put(torch.randn(size, size).bfloat16()) for _ in range(2))

    def multiply(num: int) -> None:
        with device.computing():
            for _ in range(num):
                product = left @ right
            corner = product[:1, :1].float()
        device.fetch(corner)

    once_s = _seconds(lambda: multiply(1))
    num = max(1, round(MATMUL_S / ROUNDS / once_s))
    return 2 * size**3 * num / _seconds(lambda: multiply(num))


def _seconds(work: Callable[[], object]) -> float:
    """The median of some rounds, after one that warms up."""
    work()
    times_s = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return median(times_s)
