"""How fast the CPU updates parameters: the bytes that the kernels move against those that memcpy moves.

    python benchmarks/optimizer.py                     64M parameters in chunks of 4M, 1 and 2 threads: the bar is 1.3 of memcpy
    python benchmarks/optimizer.py --million 16        the same with less memory

Moved bytes are all that have to be read and written: 26 per parameter for AdamW on a split master (12 read, 12 written, 2 of
gradient), and for memcpy twice the copied ones. Both sides work chunk by chunk on the same threads and the same huge pages.
Every rate is a median over interleaved rounds, every ratio a median of paired rounds. A share is what a kernel keeps of its
rate while bf16 matmuls run on all cores, and what they keep of theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lohan import native
from lohan.host.pool import HostPool
from lohan.optim import SGD, AdamW, Optimizer
from lohan.optim.base import Part

CHUNK = 4 * 2**20
"""parameters of one kernel call"""
THREADS = (1, 2)
MATMUL_SIZE = 2048
MATMULS_ALONE_S = 0.3
PASSES_BESIDE = 4
PLANE_BYTES = 2 + 2 + 2 + 4 * 4
"""of all planes, per parameter"""

Work = Callable[[slice], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel over a range of parameters."""

    name: str
    moved_bytes: int
    """read and written, per parameter"""
    work: Work


@dataclass(frozen=True, slots=True)
class Rate:
    """What one case reaches alone."""

    kernel: str
    threads: int
    mparam_s: float
    moved_gbps: float
    of_memcpy: float
    """moved bytes against moved bytes"""


@dataclass(frozen=True, slots=True)
class Share:
    """What remains of two rates when a kernel and matmuls share the cores."""

    kernel: str
    threads: int
    kernel_keeps: float
    matmul_keeps: float


def cases(num: int, pool: HostPool) -> list[Case]:
    """The measured kernels, all on the same planes."""

    def plane(name: str, dtype: torch.dtype) -> Tensor:
        return pool.allocate(num * dtype.itemsize, name).view(dtype)

    weight, rest, grad = plane("weight", torch.bfloat16), plane("rest", torch.int16), plane("grad", torch.bfloat16)
    plain, plain_grad = plane("plain", torch.float32), plane("plain_grad", torch.float32)
    mean, square = plane("mean", torch.float32), plane("square", torch.float32)
    for tensor in (weight, grad, plain, plain_grad):
        tensor.copy_(torch.randn(CHUNK).repeat(-(-num // CHUNK))[:num])

    def update(optimizer: Optimizer, master: tuple[Tensor, Tensor | None], gradient: Tensor, state: list[Tensor]) -> None:
        optimizer.update(*master, gradient, state, step=10, lr=1e-5, clip=0.5, parts=[Part(0, len(gradient), 0.01)])

    def copy(piece: slice) -> None:
        target, source = plain[piece], plain_grad[piece]
        memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def adamw_split(piece: slice) -> None:
        update(AdamW(), (weight[piece], rest[piece]), grad[piece], [mean[piece], square[piece]])

    def adamw_plain(piece: slice) -> None:
        update(AdamW(), (plain[piece], None), plain_grad[piece], [mean[piece], square[piece]])

    def sgd_split(piece: slice) -> None:
        update(SGD(lr=1e-5), (weight[piece], rest[piece]), grad[piece], [mean[piece]])

    return [
        Case("memcpy", 8, copy),
        Case("AdamW, split master", 12 + 12 + 2, adamw_split),
        Case("AdamW, fp32 master", 12 + 12 + 4, adamw_plain),
        Case("SGD, split master", 8 + 8 + 2, sgd_split),
        Case("sum of squares, bf16", 2, lambda piece: native.sum_of_squares(grad[piece])),
    ]


def seconds(work: Work, num: int, executor: ThreadPoolExecutor) -> float:
    """One pass over all chunks."""
    pieces = [slice(first, min(first + CHUNK, num)) for first in range(0, num, CHUNK)]
    start_s = time.perf_counter()
    for _ in executor.map(work, pieces):
        pass
    return time.perf_counter() - start_s


class Matmuls:
    """bf16 matmuls on all cores, from a thread of their own, until stopped."""

    def __init__(self) -> None:
        self._left, self._right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).bfloat16() for _ in range(2))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._num, self._elapsed_s = 0, 0.0

    def __enter__(self) -> Matmuls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def rate(self) -> float:
        """matmuls per second, once stopped"""
        return self._num / self._elapsed_s

    def _run(self) -> None:
        start_s = time.perf_counter()
        while not self._stopped.is_set():
            self._left @ self._right
            self._num += 1
        self._elapsed_s = time.perf_counter() - start_s


def rates(measured: Sequence[Case], num: int, rounds: int) -> list[Rate]:
    """Each case against memcpy, which is the first, on the same number of threads."""
    found = []
    for num_threads in THREADS:
        with ThreadPoolExecutor(num_threads) as executor:
            for case in measured:
                seconds(case.work, num, executor)  # warms up the threads and the caches
            rounds_s = [[seconds(case.work, num, executor) for case in measured] for _ in range(rounds)]
        gbps = [[case.moved_bytes * num / time_s / 1e9 for case, time_s in zip(measured, row, strict=True)] for row in rounds_s]
        for index, case in enumerate(measured):
            median_gbps = statistics.median(row[index] for row in gbps)
            of_memcpy = statistics.median(row[index] / row[0] for row in gbps)
            found.append(Rate(case.name, num_threads, median_gbps / case.moved_bytes * 1e3, median_gbps, of_memcpy))
    return found


def share(case: Case, num: int, rounds: int, num_threads: int) -> Share:
    """What the kernel and the matmuls keep of their rates when both run."""
    kernel_keeps, matmul_keeps = [], []
    with ThreadPoolExecutor(num_threads) as executor:
        for _ in range(rounds):
            alone_s = seconds(case.work, num, executor)
            with Matmuls() as alone:
                time.sleep(MATMULS_ALONE_S)
            with Matmuls() as beside:
                beside_s = statistics.mean(seconds(case.work, num, executor) for _ in range(PASSES_BESIDE))
            kernel_keeps.append(alone_s / beside_s)
            matmul_keeps.append(beside.rate / alone.rate)
    return Share(case.name, num_threads, statistics.median(kernel_keeps), statistics.median(matmul_keeps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=64, help="parameters, in units of 2**20")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num = options.million * 2**20
    measured = cases(num, HostPool(PLANE_BYTES * num))
    measured_rates = rates(measured, num, options.rounds)
    shares = [share(measured[1], num, options.rounds, num_threads) for num_threads in THREADS]

    print(f"{'kernel (' + native.INSTRUCTION_SETS[-1] + ')':22} threads   Mparam/s   GB/s moved   of memcpy")
    for rate in measured_rates:
        print(f"{rate.kernel:22} {rate.threads:7} {rate.mparam_s:10.0f} {rate.moved_gbps:12.1f} {rate.of_memcpy:11.2f}")
    for kept in shares:
        print(
            f"beside matmuls, {kept.threads} threads: {kept.kernel} keeps {kept.kernel_keeps:.2f}, they {kept.matmul_keeps:.2f}"
        )
    print(f"memcpy in copied bytes, 1 thread: {measured_rates[0].moved_gbps / 2:.1f} GB/s")
    results = {"rates": [asdict(rate) for rate in measured_rates], "shares": [asdict(kept) for kept in shares]}
    print(json.dumps({"benchmark": "optimizer", "parameters": num, **results}))


if __name__ == "__main__":
    main()
