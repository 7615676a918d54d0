"""`lohan doctor` as people meet it: the report of this machine, its exit codes, its JSON, the self-test, the guide."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.cli import main
from lohan.errors import LohanError, OptionError
from lohan.machine import drive_rates, examination, rates, selftest
from lohan.machine.console import Console, render
from lohan.machine.doctor import parser
from lohan.machine.examination import Examination, Request
from lohan.machine.findings import Finding, Level
from lohan.machine.machine import HostRates, Machine
from tests.unit.machines import FakeMachine, bad

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "doctor.md"
MIB = 2**20
FINDING = re.compile(r"^  (?:ok|note|warning|problem)\s+\S")


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, empty, on the drive that holds the checkout: /tmp may be tmpfs, which is no drive."""
    (ROOT / ".bench").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".bench") as folder, monkeypatch.context() as patch:
        patch.chdir(folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is measured, on less and for shorter."""
    monkeypatch.setattr(rates, "host_rates", lambda cores: HostRates(rates.memory_gbps(MIB), rates.host_flops(64), 1e9, 2e9))
    small = drive_rates.Sizes(MIB, 2)
    monkeypatch.setattr(drive_rates, "Sizes", lambda: small)
    monkeypatch.setattr(drive_rates, "SECONDS", 0.02)
    monkeypatch.setattr(drive_rates, "FILL_S", 0.05)
    monkeypatch.setattr(drive_rates, "FREE_PART", 1e-3)
    monkeypatch.setattr(drive_rates, "FILE_BYTES", 16 * MIB)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


# ---------------------------------------------------------------- the report


def test_the_report_of_this_machine(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys, "--ssd", "one", "--tbw", "600")
    headings = [line for line in report.splitlines() if line and not line.startswith(" ")]
    assert headings[:5] == ["processor", "software", "memory", "rates", "gpu"] and f"drive {drive}/one" in headings
    for name in ("cores", "torch", "huge pages", "AdamW", "O_DIRECT", "bandwidth", "steady writing"):
        assert re.search(rf"^  \w+ +{name}  ", report, re.MULTILINE), name
    assert "rated for 600.0 TB" in report
    assert code == (1 if "\n  problem" in report else 0)
    assert list(drive.iterdir()) == []


def test_quick_does_not_fill_the_cache_and_the_current_folder_neither(
    drive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_rates, "fill_cache", None)
    code, report = doctor(capsys, "--ssd", "one", "--quick")
    assert "bandwidth  " in report and "steady writing" not in report
    code, report = doctor(capsys)
    assert f"drive {drive}\n" in report and f"lohan doctor --ssd {drive} writes until" in report


def test_memory_is_no_drive(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys, "--ssd", "/dev/shm/lohan")
    assert code == 1 and re.search(r"^  problem +filesystem +tmpfs$", report, re.MULTILINE)
    assert "bandwidth" not in report and not Path("/dev/shm/lohan").exists()


def test_a_folder_that_a_run_would_refuse_is_a_problem(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (drive / "open").mkdir()
    (drive / "open").chmod(0o777)
    code, report = doctor(capsys, "--ssd", "open")
    assert code == 1 and "is writable by other users." in report and "chmod 700" in report


def test_a_filesystem_without_direct_access_is_a_problem(
    drive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OptionError("ssd", str(folder), "the filesystem there has no O_DIRECT", "Name a folder on ext4 or XFS")

    monkeypatch.setattr(drive_rates, "try_folder", refuse)
    code, report = doctor(capsys, "--ssd", "one")
    assert code == 1 and "has no O_DIRECT" in report and "-> Name a folder on ext4 or XFS" in report


def test_what_breaks_does_not_hide_the_rest(
    drive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LohanError("imagined")

    monkeypatch.setattr(rates, "host_rates", fail)
    monkeypatch.setattr(drive_rates, "measure", fail)
    code, report = doctor(capsys, "--json")
    found = json.loads(report)
    failed = [finding for finding in found["findings"] if finding["value"] == "failed"]
    assert code == 1 and found["counts"]["problem"] == len(failed) == 2
    assert {finding["area"].split()[0] for finding in failed} == {"rates", "drive"}
    assert all(finding["wrong"] == "LohanError: imagined" for finding in failed)


def test_json_has_the_machine_in_numbers(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys, "--ssd", "one", "two", "--json", "--tbw", "600", "300")
    found = json.loads(report)
    machine = Machine.from_dict(found["machine"])
    assert machine.cores >= 1 and machine.ram_bytes >= machine.available_bytes > 0 and machine.host.adamw_per_s == 1e9
    assert [each.rated_bytes for each in machine.drives] == [600 * 10**12, 300 * 10**12]
    for each in machine.drives:
        assert each.read_gbps and each.write_gbps and each.mixed_gbps and each.sustained_write_gbps
    assert found["format"] == examination.FORMAT and sum(found["counts"].values()) == len(found["findings"])


@pytest.mark.parametrize("tbw", [["0"], ["nan"], ["600", "300", "100"]])
def test_a_rating_that_cannot_be_is_refused(tbw: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ssd", "one", "two", "--tbw", *tbw]) == 2
    assert "tbw=" in capsys.readouterr().err


def test_a_faked_machine_with_a_gpu_is_examined_on_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: cards from /sys, and a torch that cannot use them."""
    fake = FakeMachine(tmp_path)
    fake.gpu(width=4, max_width=16)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("lohan.device.cuda.is_available", lambda: False)
    monkeypatch.setattr(drive_rates, "try_folder", lambda folder: None)
    seen = Examination(Request((tmp_path,)), Console(shows=False), fake.system)
    monkeypatch.setattr(drive_rates, "measure", lambda *_: drive_rates.Rates(6.0, 5.0, 6.0))
    monkeypatch.setattr(drive_rates, "fill_cache", lambda *_: drive_rates.Sustained(5.0, 4.0, 10**9, 1.0, True))
    seen.run()
    levels = bad(finding for finding in seen.findings if finding.area.startswith("gpu"))
    assert levels == {"torch": Level.PROBLEM, "link": Level.WARNING}
    assert seen.num(Level.PROBLEM) == 1 and seen.machine is not None and seen.machine.cores == 16


def test_a_gpu_is_measured_while_its_link_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated device in place of the GPU, on a machine whose /sys has one."""
    from lohan.device import open_device
    from tests.unit.machines import CARD

    fake = FakeMachine(tmp_path)
    fake.gpu()
    measure = rates.gpu_rates
    monkeypatch.setattr("lohan.device.cuda.num_gpus", lambda: 1)
    monkeypatch.setattr("lohan.device.cuda.pci_address", lambda index: CARD)
    device = open_device("emulated", 64 * MIB)
    monkeypatch.setattr(device, "describe", lambda: {"gpu": "imagined"})
    monkeypatch.setattr("lohan.device.open_device", lambda name, memory_bytes: device)
    monkeypatch.setattr(rates, "gpu_rates", lambda *a: measure(*a, copy_bytes=MIB, matmul=32))
    seen = Examination(Request((tmp_path,), quick=True), Console(shows=False), fake.system)
    monkeypatch.setattr(drive_rates, "try_folder", lambda folder: None)
    monkeypatch.setattr(drive_rates, "measure", lambda *_: drive_rates.Rates(6.0, 5.0, 6.0))
    seen.run()
    names = [finding.name for finding in seen.findings if finding.area == "gpu 0"]
    assert names == ["model", "driver", "link", "copies", "matrix products"]
    assert seen.machine is not None and seen.machine.gpus[0].name == "imagined"


@pytest.mark.parametrize(("module", "rest"), [("torch", set()), ("lohan.engine", {"rates", "gpu"})])
def test_what_cannot_be_imported_is_a_problem(
    module: str, rest: set[str], drive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        if name == module:
            raise ImportError("cannot import name 'imagined'")

    monkeypatch.setattr(examination, "import_module", refuse)
    code, report = doctor(capsys, "--quick", "--selftest", "--json")
    found = json.loads(report)
    (problem,) = [finding for finding in found["findings"] if finding["value"] == "failed"]
    assert code == 1 and problem["name"] == module and "ImportError: cannot import" in problem["wrong"]
    areas = {finding["area"] for finding in found["findings"]}
    assert rest <= areas and "self-test" not in areas and found["machine"]["cores"] >= 1


# ---------------------------------------------------------------- the self-test


def test_the_self_test_of_this_machine(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = doctor(capsys, "--quick", "--selftest")
    assert report.startswith("```text\n") and report.endswith("\n```\n")
    devices = re.findall(
        r"^  ok +(\S+) +same bits in memory and from the SSD, loss (\S+) to (\S+), weights (\w+)", report, re.M
    )
    assert [device for device, *_ in devices[:2]] == ["cpu", "emulated"]
    assert devices[0][1:] == devices[1][1:] and float(devices[0][2]) < float(devices[0][1])
    assert list(drive.iterdir()) == []


def outcome(**changes: Any) -> selftest.Outcome:
    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    return replace(selftest.Outcome((6.0, 5.5), (2.0, 1.9), weights, 0.1), **changes)


def test_one_bit_is_enough_for_a_problem() -> None:
    good, nudged = (
        outcome(),
        outcome(weights={"a": torch.ones(3), "b": torch.zeros(2, 2).index_fill(0, torch.tensor(0), 1e-45)}),
    )
    assert selftest.judge("cpu", good, outcome(), None).level is Level.OK
    finding = selftest.judge("cpu", good, nudged, None)
    assert finding.level is Level.PROBLEM and "1 of 2 weights, first b" in finding.wrong
    assert good.digest != nudged.digest
    for other in (outcome(losses=(6.0, 5.4)), outcome(norms=(2.0, 1.8))):
        assert selftest.judge("cpu", good, other, None).level is Level.PROBLEM


def test_an_emulated_device_has_the_bits_of_the_processor_and_a_gpu_comes_close() -> None:
    good, close, far = outcome(), outcome(losses=(6.01, 5.51)), outcome(losses=(6.0, 5.0))
    assert selftest.judge("emulated", close, close, good).level is Level.PROBLEM
    assert selftest.judge("cuda:0", close, close, good).level is Level.OK
    assert selftest.judge("cuda:0", far, far, good).level is Level.PROBLEM


def test_a_loss_that_does_not_fall_is_a_problem() -> None:
    for losses in ((6.0, 6.1), (6.0, float("nan"))):
        flat = outcome(losses=losses)
        assert selftest.judge("cpu", flat, flat, None).level is Level.PROBLEM


def test_a_device_that_fails_leaves_a_traceback_and_the_others_are_tested(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(device: str, model: Path, folder: Path | None) -> selftest.Outcome:
        if device == "cpu":
            raise RuntimeError("imagined failure")
        return outcome()

    monkeypatch.setattr(selftest, "train", train)
    first, second = selftest.selftest(["cpu", "emulated"], drive, lambda text: None)
    assert first.level is Level.PROBLEM and "imagined failure" in first.wrong and "in train" in first.wrong
    assert second.level is Level.OK


# ---------------------------------------------------------------- the console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def waited_for(stream: io.StringIO, text: str) -> str:
    until_s = time.monotonic() + 30
    while text not in stream.getvalue() and time.monotonic() < until_s:
        time.sleep(0.01)
    return stream.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_there_is_a_sign_of_life(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.machine.console.QUIET_S", 0.0)
    monkeypatch.setattr("lohan.machine.console.TERMINAL_S", 0.01)
    out, err = io.StringIO(), kind()
    with Console(out=out, err=err) as console, console.doing("thinking"):
        assert "... thinking (0 s)" in waited_for(err, "thinking")
        console.tell("thinking harder")
        assert "thinking harder" in waited_for(err, "harder")
    assert out.getvalue() == ""
    assert err.getvalue().endswith("\r\x1b[2K" if kind is Terminal else "\n")


def test_colors_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    finding = Finding("memory", "RAM", "64 GiB")
    for out, has_colors in ((Terminal(), True), (io.StringIO(), False)):
        Console(out=out, err=io.StringIO()).show(finding)
        assert ("\x1b[32m" in out.getvalue()) is has_colors


def test_what_is_wrong_stands_below_and_commands_are_not_cut_at_hyphens() -> None:
    remedy = "sudo apt install " + " ".join(f"a-package-{num}" for num in range(12))
    text = render(Finding("memory", "huge pages", "never", Level.WARNING, "Slow.", remedy))
    first, second, *rest = text.splitlines()
    assert first == "  warning  huge pages          never" and second == "           Slow."
    assert rest[0].startswith("           -> sudo apt") and not any(line.endswith("-") for line in rest)


# ---------------------------------------------------------------- starting, and the guide


def test_it_starts_without_torch() -> None:
    """What is told comes before what takes seconds to import."""
    code = (
        "import sys, lohan.machine.doctor, lohan.machine.machine; print(*{'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.split() == []


def test_the_guide_tells_of_every_option() -> None:
    guide = GUIDE.read_text()
    options = [option for action in parser()._actions for option in action.option_strings if option.startswith("--")]
    assert [option for option in options if option != "--help" and f"`{option}" not in guide] == []
    (report,) = re.findall(r"^```text\n(processor\n.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert sum(bool(FINDING.match(line)) for line in report.splitlines()) > 20


def test_the_program_of_the_guide_runs_on_what_the_command_prints(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = doctor(capsys, "--ssd", "one", "--json")
    (drive / "machine.json").write_text(report)
    (program,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(program, str(GUIDE), "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == str(json.loads(report)["machine"]["cores"]) and second.startswith(f"{drive}/one ")


def test_the_lines_of_the_guide_are_those_of_the_command(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every name that the report of this machine has is in the guide's."""
    _, report = doctor(capsys, "--ssd", "one")
    name = re.compile(r"^  (?:ok|note|warning|problem)\s+(.{20})", re.MULTILINE)
    optional = {"load", "torch's threads", "link", "layers", "torch", "model", "memory", "driver", "copies"}
    assert {found.strip() for found in name.findall(report)} - optional <= {f.strip() for f in name.findall(GUIDE.read_text())}
