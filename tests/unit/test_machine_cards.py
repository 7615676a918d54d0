"""PCI links, GPUs and drives of machines made of files: each thing that can be wrong with them once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lohan.machine.drives import Drive, drive_findings, find_drive, shared_findings, shown
from lohan.machine.findings import Finding, Level
from lohan.machine.gpus import TorchGpus, find_gpus, gpu_findings, torch_findings
from lohan.machine.pci import link_findings, read_link
from lohan.machine.system import System
from tests.unit.machines import CARD, GENERATION_1, GENERATION_3, FakeMachine, bad, one

CUDA, CPU_BUILD, BLIND = TorchGpus("12.8", 1), TorchGpus(None, 0), TorchGpus("12.8", 0)
FOLDER = Path("/nvme/lohan")
TERABYTE = 10**12


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


# ---------------------------------------------------------------- links


def link_of(machine: FakeMachine, *, under_load: bool = True, **link: Any) -> Finding:
    machine.gpu(**link)
    (finding,) = link_findings("gpu 0", read_link(machine.system, CARD, under_load=under_load))
    return finding


def test_a_link_that_is_all_it_can_be_is_ok(machine: FakeMachine) -> None:
    finding = link_of(machine)
    assert (finding.level, finding.value) == (Level.OK, "generation 4 x16, 31.5 GB/s each way")


def test_too_few_lanes_are_a_warning_loaded_or_idle(machine: FakeMachine) -> None:
    for under_load in (True, False):
        finding = link_of(machine, under_load=under_load, width=4, max_width=16)
        assert finding.level is Level.WARNING
        assert "x4" in finding.value and "(of x16)" in finding.value and "4 times as long" in finding.wrong


def test_a_slow_generation_is_a_warning_only_while_data_moves(machine: FakeMachine) -> None:
    assert link_of(machine, speed=GENERATION_3).level is Level.WARNING
    assert link_of(machine, speed=GENERATION_1, under_load=False).level is Level.NOTE


def test_what_the_slot_cannot_do_is_a_note(machine: FakeMachine) -> None:
    finding = link_of(machine, speed=GENERATION_3, port_speed=GENERATION_3)
    assert finding.level is Level.NOTE and "its slot cannot" in finding.wrong


@pytest.mark.parametrize("link", [{"speed": "Unknown"}, {"width": 255, "max_width": 16}, {"width": 0, "max_width": 16}])
def test_a_link_that_is_not_told_is_no_fault(machine: FakeMachine, link: dict[str, Any]) -> None:
    finding = link_of(machine, **link)
    assert (finding.level, finding.value) == (Level.OK, "not told by this machine")


# ---------------------------------------------------------------- GPUs


def gpus_of(machine: FakeMachine, torch: TorchGpus) -> list[Finding]:
    gpus = find_gpus(machine.system)
    findings = list(torch_findings(gpus, torch))
    for index, gpu in enumerate(gpus):
        findings += gpu_findings(f"gpu {index}", gpu)
    return findings


def test_a_gpu_that_torch_uses_is_ok(machine: FakeMachine) -> None:
    machine.gpu()
    findings = gpus_of(machine, CUDA)
    assert bad(findings) == {}
    assert one(findings, "model").value == f"NVIDIA Imagined 4090 ({CARD})"
    assert one(findings, "driver").value == "550.54.14"
    assert one(findings, "torch").value == "built for 12.8, uses 1 of 1"


def test_no_gpu_is_a_note(machine: FakeMachine) -> None:
    assert bad(gpus_of(machine, CPU_BUILD)) == {"found": Level.NOTE}


def test_a_card_without_a_driver_is_a_problem(machine: FakeMachine) -> None:
    machine.gpu(driver=False)
    assert bad(gpus_of(machine, BLIND)) == {"driver": Level.PROBLEM}


def test_torch_without_cuda_beside_a_gpu_is_a_problem(machine: FakeMachine) -> None:
    machine.gpu()
    findings = gpus_of(machine, CPU_BUILD)
    assert bad(findings) == {"torch": Level.PROBLEM}
    assert "without CUDA" in one(findings, "torch").value and "pip install" in one(findings, "torch").remedy


def test_a_gpu_that_torch_does_not_find_is_a_problem(machine: FakeMachine) -> None:
    machine.gpu()
    findings = gpus_of(machine, BLIND)
    assert bad(findings) == {"torch": Level.PROBLEM} and "finds no GPU" in one(findings, "torch").value


def test_another_makers_gpu_is_a_note_and_a_processors_own_graphics_are_none(machine: FakeMachine) -> None:
    machine.pci(CARD, "0000:00:01.0", vendor="0x8086")
    assert find_gpus(machine.system) == []
    machine.pci(CARD, "0000:00:01.0", vendor="0x1002")
    assert bad(gpus_of(machine, CPU_BUILD)) == {"driver": Level.NOTE}


def test_nvidia_smi_tells_memory_and_cards_that_no_bus_shows(machine: FakeMachine) -> None:
    machine.answers["nvidia-smi"] = "00000000:01:00.0, NVIDIA Imagined 4090, 24564, 580.1\nnot a line of a card"
    findings = gpus_of(machine, CUDA)
    assert bad(findings) == {}
    assert one(findings, "memory").value == "24.0 GiB" and one(findings, "driver").value == "580.1"


# ---------------------------------------------------------------- drives


def drive_of(machine: FakeMachine, folder: Path = FOLDER) -> Drive:
    return find_drive(machine.system, folder)


def drive_bad(machine: FakeMachine, rated_bytes: int | None = TERABYTE) -> dict[str, Level]:
    levels = bad(drive_findings(drive_of(machine), rated_bytes))
    levels.pop("free", None)  # that of the real root
    return levels


def test_a_sound_drive_is_found_behind_its_partition(machine: FakeMachine) -> None:
    drive = drive_of(machine)
    assert (drive.filesystem, drive.source, drive.layers) == ("ext4", "/dev/nvme0n1p2", ())
    (disk,) = drive.disks
    assert (disk.device, disk.model, disk.spins, str(disk.link)) == (
        "nvme0n1", "Imagined SSD 990", False, "generation 4 x4, 7.9 GB/s each way",
    )  # fmt: skip
    assert drive_bad(machine) == {}


def mounted(kind: str, source: str = "/dev/nvme0n1p2", number: str = "259:2") -> Callable[[FakeMachine], None]:
    return lambda m: m.mounts(f"30 29 {number} / /nvme rw - {kind} {source} rw")


def spinning(machine: FakeMachine) -> None:
    machine.disk("sda", "0000:00:17.0/ata1", "Imagined HDD", "8:2", spins=1)
    mounted("ext4", "/dev/sda2", "8:2")(machine)


def narrow(machine: FakeMachine) -> None:
    machine.write("sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0/current_link_width", 2)
    machine.write("sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0/max_link_width", 4)


WRONG: list[tuple[str, Callable[[FakeMachine], None], dict[str, Level]]] = [
    ("tmpfs", mounted("tmpfs", "tmpfs", "0:40"), {"filesystem": Level.PROBLEM, "device": Level.NOTE}),
    ("nfs", mounted("nfs4", "server:/home", "0:41"), {"filesystem": Level.WARNING, "device": Level.NOTE}),
    ("overlay", mounted("overlay", "overlay", "0:42"), {"filesystem": Level.WARNING, "device": Level.NOTE}),
    ("btrfs", mounted("btrfs", "/dev/nvme0n1p2", "0:43"), {"filesystem": Level.NOTE}),
    ("spinning", spinning, {"device": Level.WARNING}),
    ("narrow", narrow, {"link": Level.WARNING}),
]


@pytest.mark.parametrize(("change", "levels"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_with_a_drive_is_found(
    machine: FakeMachine, change: Callable[[FakeMachine], None], levels: dict[str, Level]
) -> None:
    change(machine)
    assert drive_bad(machine) == levels


def test_a_virtual_disk_that_claims_to_spin_is_not_believed(machine: FakeMachine) -> None:
    machine.disk("vda", "0000:00:03.0/virtio1", "", "254:2", spins=1)
    mounted("ext4", "/dev/vda2", "254:2")(machine)
    assert drive_bad(machine) == {}


def test_the_disk_under_encryption_is_found(machine: FakeMachine) -> None:
    partition = "sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0/block/nvme0n1/nvme0n1p2"
    machine.stacked("dm-0", "253:0", partition, {"dm/uuid": "CRYPT-LUKS2-8a1f-nvme"})
    mounted("ext4", "/dev/mapper/nvme", "253:0")(machine)
    drive = drive_of(machine)
    assert drive.layers == ("crypt",) and [disk.device for disk in drive.disks] == ["nvme0n1"]
    assert drive_bad(machine) == {"layers": Level.NOTE}


def test_the_longest_mount_above_a_folder_counts(machine: FakeMachine) -> None:
    machine.mounts(
        "29 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw",
        r"30 29 0:50 / /nvme\040one rw - xfs /dev/nvme0n1p2 rw",
        "31 29 0:51 / /nvme rw - tmpfs tmpfs rw",
    )
    assert drive_of(machine, Path("/nvme one/x")).filesystem == "xfs"
    assert drive_of(machine, Path("/nvme/x")).filesystem == "tmpfs"
    assert drive_of(machine, Path("/nvmes")).filesystem == "ext4"


def test_two_folders_on_one_drive_are_a_warning(machine: FakeMachine) -> None:
    drives = [drive_of(machine), drive_of(machine, Path("/other"))]
    assert bad(shared_findings(drives)) == {"shares": Level.WARNING}
    assert bad(shared_findings(drives[:1])) == {}


def test_little_room_is_a_warning(machine: FakeMachine) -> None:
    drive = drive_of(machine)
    full, roomy = (
        Drive(drive.folder, "ext4", "", free, TERABYTE, (), drive.disks) for free in (19 * 10**9, 21 * 10**9)
    )  # fmt: skip
    assert bad(drive_findings(full, TERABYTE)) == {"free": Level.WARNING}
    assert bad(drive_findings(roomy, TERABYTE)) == {}


def test_a_report_does_not_name_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane")
    assert shown(Path("/home/jane/models/x")) == "~/models/x"
    assert shown(Path("/nvme/x")) == "/nvme/x"


# ---------------------------------------------------------------- age


def smartctl(machine: FakeMachine, **log: int) -> None:
    machine.answers["smartctl"] = json.dumps({"nvme_smart_health_information_log": log})


def endurance_of(machine: FakeMachine, rated_bytes: int | None = None) -> Finding:
    return one(drive_findings(drive_of(machine), rated_bytes), "endurance")


def test_an_unknown_age_is_a_note_that_says_how_to_give_it(machine: FakeMachine) -> None:
    finding = endurance_of(machine)
    assert (finding.level, finding.value) == (Level.NOTE, "unknown") and "--tbw" in finding.wrong
    assert endurance_of(machine, 600 * TERABYTE).value == "rated for 600.0 TB"


def test_the_rating_is_worked_out_from_what_is_used(machine: FakeMachine) -> None:
    smartctl(machine, percentage_used=20, data_units_written=200_000_000, critical_warning=0)
    assert endurance_of(machine).value == "102.4 TB written, 20% of its rated life used, rated for about 512.0 TB"
    smartctl(machine, percentage_used=1, data_units_written=200_000_000)
    assert endurance_of(machine).level is Level.NOTE  # one percent tells nothing of the rating


def test_an_old_drive_is_a_warning_and_a_failing_one_a_problem(machine: FakeMachine) -> None:
    smartctl(machine, percentage_used=104, data_units_written=10**9)
    assert drive_bad(machine) == {"endurance": Level.WARNING}
    smartctl(machine, percentage_used=2, data_units_written=10**6, critical_warning=4)
    assert drive_bad(machine) == {"health": Level.PROBLEM}


def test_nvme_is_asked_where_smartctl_is_not(machine: FakeMachine) -> None:
    machine.answers["nvme"] = json.dumps({"percent_used": 10, "data_units_written": 10**8, "critical_warning": 0})
    assert "rated for about 512.0 TB" in endurance_of(machine).value


def test_a_sata_drive_counts_in_sectors(machine: FakeMachine) -> None:
    rows = [{"id": 241, "name": "Total_LBAs_Written", "raw": {"value": 10**9}}]
    answer = {"ata_smart_attributes": {"table": rows}, "endurance_used": {"current_percent": 10}, "logical_block_size": 512}
    machine.answers["smartctl"] = json.dumps({**answer, "smart_status": {"passed": True}})
    assert endurance_of(machine).value == "512.0 GB written, 10% of its rated life used, rated for about 5.1 TB"
    machine.answers["smartctl"] = json.dumps({**answer, "smart_status": {"passed": False}})
    assert drive_bad(machine) == {"health": Level.PROBLEM}


@pytest.mark.parametrize("answer", ["Permission denied", "[]", "{}", '{"smartctl": {"exit_status": 2}}'])
def test_an_answer_that_tells_nothing_is_no_age(machine: FakeMachine, answer: str) -> None:
    machine.answers["smartctl"] = answer
    assert endurance_of(machine).value == "unknown"


def test_the_drive_of_this_machine_is_found() -> None:
    drive = find_drive(System(), Path.cwd() / "not" / "there" / "yet")
    assert drive.filesystem != "unknown" and drive.total_bytes >= drive.free_bytes > 0
