"""What the doctor reads off the system: processor, memory and versions, each thing that can be wrong with them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lohan.machine.findings import Finding, Level
from lohan.machine.memory import memory_findings, read_memory
from lohan.machine.processor import processor_findings, read_processor
from lohan.machine.software import Software, software_findings
from lohan.machine.system import System, ask_program
from tests.unit.machines import GIB, FakeMachine, bad, one

Change = Callable[[FakeMachine], None]
NEEDED = {"torch": "2.6", "transformers": "5.21"}
VERSIONS = {"lohan": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.23.0"}


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def told(machine: FakeMachine, *, has_gpu: bool = True) -> list[Finding]:
    system = machine.system
    memory = memory_findings(read_memory(system), has_gpu=has_gpu)
    return [*processor_findings(read_processor(system)), *memory]


def test_nothing_is_wrong_with_a_sound_machine(machine: FakeMachine) -> None:
    findings = told(machine)
    assert bad(findings) == {}
    assert one(findings, "model").value == "Imagined 9000"
    assert one(findings, "cores").value == "16, all usable"
    assert one(findings, "bf16").value == "avx512_bf16"
    assert one(findings, "RAM").value == "64.0 GiB"
    assert one(findings, "memlock").value == "no limit"


NEVER = "always madvise [never]"
WRONG: list[tuple[str, Change, str, Level, str]] = [
    ("affinity", lambda m: m.write("proc/self/status", "Cpus_allowed_list: 0-2,8"), "cores", Level.WARNING, "4 of 16"),
    ("quota", lambda m: m.cgroup(cpu_max="250000 100000"), "cores", Level.WARNING, "2.5 of 16"),
    ("no bf16", lambda m: m.write("proc/cpuinfo", "model name: Old\nflags: avx2"), "bf16", Level.NOTE, "converted"),
    ("cgroup", lambda m: m.cgroup(memory_max=str(32 * GIB)), "RAM", Level.WARNING, "32.0 GiB of the machine's 64.0"),
    ("full", lambda m: m.cgroup(memory_max=str(3 * GIB), memory_current=str(2 * GIB)), "available", Level.PROBLEM, "1.0 GiB"),
    ("little", lambda m: m.write("proc/meminfo", f"MemTotal: {8 * 2**20} kB\nMemAvailable: {4 * 2**20} kB"), "available",
     Level.WARNING, "4.0 GiB"),
    ("no huge pages", lambda m: m.huge_pages(NEVER, "[madvise]"), "huge pages", Level.WARNING, "never"),
    ("kernel without", lambda m: m.huge_pages("", ""), "huge pages", Level.WARNING, "not in this kernel"),
    ("defrag never", lambda m: m.huge_pages("[madvise]", "always [never]"), "defrag", Level.NOTE, "never"),
    ("defrag defer", lambda m: m.huge_pages("[always]", "always [defer] never"), "defrag", Level.NOTE, "defer"),
    ("memlock", lambda m: m.write("proc/self/limits", "Max locked memory  8388608  8388608  bytes"), "memlock", Level.NOTE,
     "8 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "name", "level", "value"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_is_found(machine: FakeMachine, change: Change, name: str, level: Level, value: str) -> None:
    change(machine)
    findings = told(machine)
    assert bad(findings)[name] is level
    assert value in one(findings, name).value


def test_cores_are_those_that_can_be_kept_busy(machine: FakeMachine) -> None:
    machine.write("proc/self/status", "Cpus_allowed_list: 0-7")
    assert read_processor(machine.system).cores == 8
    machine.cgroup(cpu_max="350000 100000")
    assert read_processor(machine.system).cores == 3
    machine.cgroup(cpu_max="50000 100000")
    assert read_processor(machine.system).cores == 1
    machine.cgroup(cpu_max="max 100000")
    assert read_processor(machine.system).cores == 8


def test_the_first_version_of_cgroups_has_quotas_too(machine: FakeMachine) -> None:
    machine.write("proc/self/mounts", "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0")
    machine.write("proc/self/cgroup", "3:cpu,cpuacct:/docker/abc")
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1)
    assert bad(told(machine)) == {}
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", 400000)
    assert one(told(machine), "cores").value.startswith("4 of 16")


def test_memlock_is_of_no_interest_without_a_gpu(machine: FakeMachine) -> None:
    machine.write("proc/self/limits", "Max locked memory  8388608  8388608  bytes")
    assert bad(told(machine, has_gpu=False)) == {}
    machine.write("proc/self/limits", f"Max locked memory  {64 * GIB}  {64 * GIB}  bytes")
    assert bad(told(machine, has_gpu=True)) == {}


def test_a_machine_that_tells_little_is_examined_all_the_same(machine: FakeMachine) -> None:
    for name in ("proc/cpuinfo", "proc/self/limits", "sys/devices/system/cpu/online", "proc/self/status"):
        (machine.root / name).unlink()
    assert one(told(machine), "model").value == "unknown"
    assert read_processor(machine.system).cores >= 1


@pytest.mark.parametrize(
    ("packages", "name", "level"),
    [
        ({**VERSIONS, "torch": None}, "torch", Level.PROBLEM),
        ({**VERSIONS, "torch": "2.5.1"}, "torch", Level.PROBLEM),
        ({**VERSIONS, "transformers": "5.9.0"}, "transformers", Level.PROBLEM),
    ],
)
def test_old_and_missing_packages_are_problems(packages: dict[str, str | None], name: str, level: Level) -> None:
    findings = list(software_findings(Software("6.1.0", "3.11.7", packages, NEEDED)))
    assert bad(findings) == {name: level}
    assert f"'{name}>={NEEDED[name]}'" in one(findings, name).remedy


def test_versions_that_do_are_ok_and_an_old_kernel_is_a_note() -> None:
    assert bad(software_findings(Software("5.14.0-70.el9", "3.11.7", VERSIONS, NEEDED))) == {}
    assert bad(software_findings(Software("5.4.0-100-generic", "3.11.7", VERSIONS, NEEDED))) == {"Linux": Level.NOTE}


def test_a_warning_without_a_remedy_cannot_be_made() -> None:
    for level in (Level.WARNING, Level.PROBLEM):
        with pytest.raises(ValueError, match="how to mend it"):
            Finding("memory", "RAM", "little", level, "There is not enough.")


def test_programs_that_are_missing_or_say_nothing_are_no_answer() -> None:
    assert ask_program(["lohan-has-no-such-program"]) is None
    assert ask_program(["true"]) is None
    assert ask_program(["echo", "yes"]) == "yes"
    assert System().number("proc/self/status") is None
