"""What the doctor measures: drives through the store, devices through their protocol; and what it says of the numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lohan.device import open_device
from lohan.errors import OptionError
from lohan.machine import drive_rates, rates
from lohan.machine.drive_rates import Plateau, Rates, Sizes, Sustained, fill_cache, measure, scratch, try_folder
from lohan.machine.findings import Level
from lohan.machine.machine import DriveRates, GpuRates, HostRates, Machine
from lohan.machine.rate_findings import (
    drive_rate_findings,
    gpu_rate_findings,
    host_findings,
    kernel_finding,
    load_findings,
    sustained_findings,
)
from tests.unit.machines import bad, one

ROOT = Path(__file__).parents[2]
MIB = 2**20
SMALL = Sizes(tensor_bytes=MIB, num_in_flight=2)


@pytest.fixture
def drive() -> Iterator[Path]:
    """An empty folder on the drive that holds the checkout: /tmp may be tmpfs, which is no drive."""
    (ROOT / ".bench").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".bench") as folder:
        yield Path(folder)


class Told:
    """What was told as under way."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        self.texts.append(text)


# ---------------------------------------------------------------- drives


def test_a_drive_is_measured_each_way_and_nothing_stays(drive: Path) -> None:
    told = Told()
    found = measure(drive, 16 * MIB, SMALL, told, seconds=0.05)
    assert min(found.read_gbps, found.write_gbps, found.mixed_gbps) > 0
    assert told.texts == ["writing", "reading", "reading and writing"]
    assert list(drive.iterdir()) == []


def test_only_what_was_written_is_read(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow drive writes a part of the file in its time; blocks never written are read faster than a drive can."""
    ranges = []
    run = drive_rates._run

    def record(streams: list[drive_rates._Stream], *limits: float) -> tuple[float, int]:
        ranges.append([(stream.first, stream.nbytes) for stream in streams])
        return run(streams, *limits)

    monkeypatch.setattr(drive_rates, "_run", record)
    measure(drive, 16 * MIB, SMALL, Told(), seconds=0.0)  # time for one tensor each
    assert ranges == [[(0, 16 * MIB)], [(0, MIB)], [(0, MIB), (8 * MIB, 8 * MIB)]]


def test_a_fast_drive_is_not_worn(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    run = drive_rates._run
    monkeypatch.setattr(drive_rates, "_run", lambda *a: written.append(run(*a)) or written[-1])
    measure(drive, 16 * MIB, SMALL, Told(), seconds=60.0)
    assert written[0][1] == drive_rates.MOST_TIMES * 16 * MIB


def test_filling_a_cache_ends_at_the_bytes_that_were_told(drive: Path) -> None:
    found = fill_cache(drive, 32 * MIB, SMALL, Told(), seconds=60.0, window_s=0.001)
    assert 28 * MIB <= found.written_bytes <= 32 * MIB and found.gbps > 0 and found.first_gbps > 0
    assert list(drive.iterdir()) == []


def test_filling_a_cache_ends_at_the_seconds_that_were_told(drive: Path) -> None:
    found = fill_cache(drive, 32 * MIB, SMALL, Told(), seconds=0.0)
    assert found.written_bytes == MIB and found.gbps > 0 and not found.fell


def test_filling_a_cache_ends_when_the_rate_has_settled(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plateau, "reached", property(lambda plateau: len(plateau._rates) == 3))
    told = Told()
    found = fill_cache(drive, 32 * MIB, SMALL, told, seconds=60.0, window_s=0.0)
    assert found.fell and found.written_bytes == 3 * MIB
    assert told.texts[-1].startswith("filling the write cache: 0.0 of 0.0 GB")


def settles(*gbps: float) -> int | None:
    """After how many windows a rate counts as fallen and steady."""
    plateau = Plateau()
    for num, rate in enumerate(gbps, 1):
        plateau.add(rate)
        if plateau.reached:
            return num
    return None


def test_a_rate_settles_when_it_has_fallen_and_stays() -> None:
    assert settles(*[5.0] * 10, *[1.0] * 20) == 18
    assert settles(*[5.0] * 40) is None  # it never fell: the cache may be larger
    assert settles(*[5.0] * 10, *[4.0] * 30) is None  # not by much
    assert settles(*[5.0] * 10, *[1.0, 2.0] * 15) is None  # it swings
    assert settles(*[5.0] * 3, 3.0, 2.0, *[1.0] * 8) == 13


def test_folders_that_were_made_are_removed_and_others_stay(drive: Path) -> None:
    with scratch(drive / "a" / "b") as inside:
        assert inside.parent == drive / "a" / "b"
        (inside / "left").write_text("behind")
    assert list(drive.iterdir()) == []
    (drive / "mine").mkdir()
    try_folder(drive / "mine")
    try_folder(drive / "mine" / "deeper")
    assert [path.name for path in drive.rglob("*")] == ["mine"]


def test_a_folder_that_a_store_would_refuse_is_refused(drive: Path) -> None:
    (drive / "open").mkdir()
    (drive / "open").chmod(0o777)
    with pytest.raises(OptionError, match="writable by other users"):
        try_folder(drive / "open")


def test_files_are_made_of_whole_rounds() -> None:
    assert SMALL.usable(4 * MIB - 1) == 0
    assert SMALL.usable(5 * MIB + 17) == 4 * MIB


# ---------------------------------------------------------------- devices


def test_a_device_is_measured_through_its_protocol() -> None:
    calls = []
    device = open_device("emulated", 64 * MIB)
    try:
        found, told = rates.gpu_rates(device, "imagined", lambda: calls.append("link"), copy_bytes=MIB, matmul=32)
    finally:
        device.close()
    assert found.name == "imagined" and found.memory_bytes == 64 * MIB and told is None
    assert found.upload_gbps and found.download_gbps and found.flops
    assert len(calls) == rates.ROUNDS + 1  # while copies to the device are under way, and not those from it


def test_the_host_is_measured_with_the_kernels_of_training() -> None:
    assert rates.memory_gbps(MIB) > 0 and rates.host_flops(32) > 0
    assert rates.adamw_per_s(1, 2**19) > 0 and rates.adamw_per_s(2, 2**19 + 5) > 0


# ---------------------------------------------------------------- what is said of them

HOST = HostRates(30.0, 1e12, 1e9, 2e9)
GPU = GpuRates("imagined", 2**34, 24.0, 25.0, 1e14)


def test_good_rates_are_ok() -> None:
    assert bad(host_findings(HOST, 8, busy=False)) == {}
    assert bad(gpu_rate_findings("gpu 0", GPU)) == {}
    assert bad(drive_rate_findings("drive", Rates(6.0, 5.0, 6.0))) == {}
    assert bad(load_findings(0.2, 8, 8)) == {}
    assert kernel_finding(("base", "avx2")).level is Level.OK


def test_slow_memory_is_a_warning_unless_others_use_it() -> None:
    slow = HostRates(memory_gbps=7.0)
    assert bad(host_findings(slow, 8, busy=False)) == {"memory": Level.WARNING}
    assert bad(host_findings(slow, 8, busy=True)) == {}


def test_a_busy_machine_is_a_note_and_unused_cores_a_warning() -> None:
    assert bad(load_findings(7.0, 8, 8)) == {"load": Level.NOTE}
    assert bad(load_findings(None, 8, 1)) == {"torch's threads": Level.WARNING}


def test_slow_copies_are_a_warning() -> None:
    slow = GpuRates("imagined", upload_gbps=12.0, download_gbps=1.5)
    assert bad(gpu_rate_findings("gpu 0", slow)) == {"copies": Level.WARNING}


def test_a_slow_drive_is_a_warning_with_what_it_means() -> None:
    findings = list(drive_rate_findings("drive", Rates(6.0, 0.5, 3.0)))
    assert bad(findings) == {"bandwidth": Level.WARNING} and "24 s for each billion" in findings[0].wrong


def test_a_drive_that_collapses_is_told() -> None:
    collapsed = list(sustained_findings("drive", Sustained(5.0, 1.2, 200 * 10**9, 80.0, True)))
    assert bad(collapsed) == {"steady writing": Level.NOTE} and "began at 5.00 GB/s" in collapsed[0].wrong
    kept = one(sustained_findings("drive", Sustained(5.0, 3.0, 200 * 10**9, 80.0, True)), "steady writing")
    assert kept.level is Level.OK and "cache full" in kept.value
    unknown = one(sustained_findings("drive", Sustained(5.0, 1.2, 4 * 10**9, 2.0, False)), "steady writing")
    assert unknown.level is Level.OK and "was not full" in unknown.value


def test_a_processor_without_kernels_of_its_own_is_a_note() -> None:
    assert kernel_finding(("base",)).level is Level.NOTE


# ---------------------------------------------------------------- the machine in numbers


def test_a_machine_is_read_as_it_was_saved(tmp_path: Path) -> None:
    machine = Machine(16, 2**36, 2**35, HOST, (DriveRates("/nvme", 10**12, 6.0, 5.0, 6.0, 1.5, 6 * 10**14),), (GPU,))
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    assert Machine.from_dict({"cores": 2, "ram_bytes": 1, "available_bytes": 1}) == Machine(2, 1, 1)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"cores": 2, "ram_bytes": 1, "available_bytes": 1, "core": 2}, "machine.core=2: no such field"),
        ({"cores": 2, "ram_bytes": 1}, "machine.available_bytes=None: it is missing"),
        ({"cores": 2, "ram_bytes": 1, "available_bytes": 1, "drives": [{"folder": "x"}]}, "free_bytes=None: it is missing"),
    ],
)
def test_a_machine_that_is_misspelt_is_refused(data: dict[str, object], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        Machine.from_dict(data)
