"""Host memory: counted to the byte, on huge pages, kept from forked children; and what the process says it uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lohan.errors import BudgetError, ClosedError, OptionError
from lohan.host import memory
from lohan.host.pool import HUGE_PAGE_BYTES, PAGE_BYTES, HostPool

MIB = 2**20


def vm_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


def test_sizes_are_counted_with_their_rounding() -> None:
    pool = HostPool(10 * PAGE_BYTES)
    small = pool.allocate(100, "small")
    assert small.dtype == torch.uint8 and small.shape == (100,) and not small.any()
    pool.allocate(2 * PAGE_BYTES, "two pages")
    assert pool.allocated_bytes == 3 * PAGE_BYTES
    assert pool.allocations == [("small", PAGE_BYTES), ("two pages", 2 * PAGE_BYTES)]
    pool.close()


def test_the_budget_can_be_used_up_and_not_passed() -> None:
    pool = HostPool(3 * PAGE_BYTES, option="host_memory")
    pool.allocate(2 * PAGE_BYTES, "first")
    with pytest.raises(BudgetError, match="host_memory=12288: second of 4097 bytes") as caught:
        pool.allocate(PAGE_BYTES + 1, "second")
    assert caught.value.needed_bytes == 4 * PAGE_BYTES
    pool.allocate(PAGE_BYTES, "third")
    assert pool.allocated_bytes == pool.budget_bytes
    pool.close()


def test_large_buffers_start_on_huge_pages() -> None:
    pool = HostPool(64 * MIB)
    for num in range(3):
        assert pool.allocate(5 * MIB + 1, f"large {num}").data_ptr() % HUGE_PAGE_BYTES == 0
    pool.close()


def test_a_reservation_is_carved_without_gaps_and_costs_nothing_more() -> None:
    pool = HostPool(8 * MIB)
    pool.reserve(4 * MIB)
    buffers = [pool.allocate(MIB + 1, f"buffer {num}") for num in range(3)]
    assert pool.allocated_bytes == 4 * MIB
    assert len(pool.arenas) == 1 and pool.arenas[0].data_ptr() % HUGE_PAGE_BYTES == 0
    assert [b.data_ptr() - pool.arenas[0].data_ptr() for b in buffers] == [num * (MIB + PAGE_BYTES) for num in range(3)]
    for num, buffer in enumerate(buffers):
        buffer.fill_(num + 1)
    assert [(int(b.min()), int(b.max())) for b in buffers] == [(1, 1), (2, 2), (3, 3)]
    pool.allocate(2 * MIB, "more than is left of the reservation")
    assert pool.allocated_bytes == 6 * MIB
    pool.close()


def test_pages_are_huge_resident_and_not_inherited() -> None:
    pool = HostPool(64 * MIB)
    before_bytes = memory.resident_bytes()
    buffer = pool.allocate(64 * MIB, "buffer")
    flags = vm_flags(buffer.data_ptr())
    assert "dc" in flags, "MADV_DONTFORK"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags, "MADV_HUGEPAGE"
    assert memory.resident_bytes() - before_bytes > 56 * MIB, "populated before anyone writes"
    pool.close()


def test_populating_works_on_kernels_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.host.pool._MADV_POPULATE_WRITE", 4095)
    pool = HostPool(64 * MIB)
    before_bytes = memory.resident_bytes()
    assert not pool.allocate(64 * MIB, "buffer").any()
    assert memory.resident_bytes() - before_bytes > 56 * MIB
    pool.close()


def test_close_gives_the_pages_back_and_leaves_tensors_harmless() -> None:
    pool = HostPool(64 * MIB)
    buffer = pool.allocate(64 * MIB, "buffer").fill_(7)
    full_bytes = memory.resident_bytes()
    pool.close()
    assert full_bytes - memory.resident_bytes() > 56 * MIB
    assert int(buffer[5]) == 0
    with pytest.raises(ClosedError):
        pool.allocate(1, "late")


def test_memory_that_the_system_refuses_is_an_error_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(2**60)
    with pytest.raises(OptionError, match="host_memory=.*the system has no memory for huge"):
        pool.allocate(2**59, "huge")
    assert pool.allocated_bytes == 0
    pool.allocate(PAGE_BYTES, "the pool still works")
    pool.close()


def test_a_peak_is_taken_for_a_period() -> None:
    if not memory.reset_peak():
        pytest.skip("/proc/self/clear_refs cannot be written here")
    start_bytes = memory.resident_bytes()
    pool = HostPool(96 * MIB)
    pool.allocate(96 * MIB, "buffer")
    pool.close()
    assert memory.peak_resident_bytes() - start_bytes > 88 * MIB
    assert memory.reset_peak()
    assert memory.peak_resident_bytes() - start_bytes < 48 * MIB


def fake_root(root: Path, mounts: str, cgroup: str, groups: dict[str, dict[str, str]]) -> Path:
    """A machine of 64 GiB, 48 of them available, with these memory cgroups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {48 * MIB} kB\n")
    (root / "proc/self/mounts").write_text(mounts)
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, files in groups.items():
        (root / folder).mkdir(parents=True)
        for name, text in files.items():
            (root / folder / name).write_text(text)
    return root


V1_MOUNTS = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"


def v1(limit: int, usage: int, cache: int) -> dict[str, str]:
    stat = f"cache {cache}\ninactive_file 1\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": stat}


def test_the_tightest_cgroup_above_is_the_limit(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/memory/outer/inner": v1(2**63 - 4096, 6 * MIB, MIB),
        "sys/fs/cgroup/memory/outer": v1(10 * MIB, 8 * MIB, 3 * MIB),
    }
    root = fake_root(tmp_path, V1_MOUNTS, "4:memory:/outer/inner\n1:cpu:/\n", dict(reversed(groups.items())))
    assert memory.limit_bytes(root) == 10 * MIB
    assert memory.available_bytes(root) == 10 * MIB - (8 - 3) * MIB


def test_in_a_container_the_mount_is_the_own_cgroup(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/memory": v1(5 * MIB, MIB, 0)}
    root = fake_root(tmp_path, V1_MOUNTS, "4:memory:/docker/0123\n", groups)
    assert memory.limit_bytes(root) == 5 * MIB


def test_version_2_knows_no_limit_by_the_word_max(tmp_path: Path) -> None:
    stat = {"memory.current": "3000\n", "memory.stat": "anon 1\ninactive_file 1000\n"}
    groups = {"sys/fs/cgroup/a": {"memory.max": "9000\n", **stat}, "sys/fs/cgroup/a/b": {"memory.max": "max\n", **stat}}
    root = fake_root(tmp_path, "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "0::/a/b\n", groups)
    assert (memory.limit_bytes(root), memory.available_bytes(root)) == (9000, 7000)


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = fake_root(tmp_path, "proc /proc proc rw 0 0\n", "0::/\n", {})
    assert (memory.limit_bytes(root), memory.available_bytes(root)) == (64 * 2**30, 48 * 2**30)
    assert 0 < memory.available_bytes() <= memory.limit_bytes()
