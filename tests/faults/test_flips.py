"""Row 12: a bit that flips on a drive, and a write that the drive lost or tore, are found before anything is trained on them.

Afterwards the store opens with exactly the state that it had, or not at all. A bit that flips back takes nothing with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lohan.errors import LohanError
from lohan.keep.store import StoredRun
from lohan.ssd.checked import CheckedStore
from lohan.ssd.records import COMMIT_BYTES, HEADER_BYTES, NUM_COMMITS, TABLES_START
from tests.faults.conftest import Begun, Tally
from tests.faults.harness import FIRST_STEP, KINDS, Kind, history, recover, scaled, seeded
from tests.faults.injection import Action, Injection, lose, tear
from tests.faults.test_calls import meet

pytestmark = [pytest.mark.faults, pytest.mark.row("12 flipped bit, lost or torn write")]
REGIONS = ("state", "any byte of the store", "header", "commits", "tables", "any byte of the record")
KINDS_HERE = [*KINDS, Kind("defer", "single")]


def regions_of(folders: list[Path], region: str) -> list[tuple[Path, int, int]]:
    """File, first byte and number of bytes that a region has."""
    if region == "state":
        run = StoredRun(folders)
        grains = list(run.grains())
        places = [(Path(path), offset) for path, offset in (run.store.locate(grain.address) for grain in grains)]
        run.close()
        return [(path, offset, 1) for path, offset in places]
    if region == "any byte of the store":
        return [(folder / "store", 0, (folder / "store").stat().st_size) for folder in folders]
    meta = next(folder / "store.meta" for folder in folders)
    spans = {
        "header": (0, 2048),
        "commits": (HEADER_BYTES, NUM_COMMITS * COMMIT_BYTES),
        "tables": (TABLES_START, meta.stat().st_size - TABLES_START),
        "any byte of the record": (0, meta.stat().st_size),
    }
    return [(meta, *spans[region])]


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def is_found(folders: list[Path], kind: Kind, *, go_on: bool = False) -> bool:
    """Whether the damage was met; where it was not, the run is what it was."""
    try:
        recover(folders, kind, FIRST_STEP - 1, go_on=go_on)
    except LohanError:
        return True
    return False


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("kind", KINDS_HERE, ids=str)
def test_flipped_bits(kind: Kind, region: str, begun: Begun, tally: Tally) -> None:
    chance, number, num_found = seeded(f"flips {kind} {region}"), scaled(2000 // len(KINDS_HERE) // len(REGIONS) + 1), 0
    folders = begun(kind)
    choices = regions_of(folders, region)
    for _ in range(number):
        path, first, num = chance.choice(choices)
        offset, bit = first + chance.randrange(num), chance.randrange(8)
        flip(path, offset, bit)
        whole = {path: path.read_bytes() for path in all_files(folders)}
        num_found += is_found(folders, kind)
        for path_there, content in whole.items():
            path_there.write_bytes(content)
        flip(path, offset, bit)
    assert recover(folders, kind, FIRST_STEP, go_on=True) == FIRST_STEP
    assert num_found == number or region != "state", "what a commit names is read by whoever goes on from it"
    tally(injected=number, fired=number)


def all_files(folders: list[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir() if path.is_file()]


@pytest.mark.parametrize("action", [lose, tear], ids=lambda action: action.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_writes_that_the_drive_lost_or_tore(action: Action, kind: Kind, begun: Begun, tally: Tally) -> None:
    """In the middle of a run that goes on: it ends with an error, or never had to read what is not there."""
    chance, number = seeded(f"{action.__name__} {kind}"), scaled(100)
    for _ in range(number):
        folders = begun(kind)
        injection = Injection("pwritev", chance.randrange(60), action, folders[0] / "fired")
        code, error, _ = meet(folders, kind, injection)
        assert code == 0 or "checksum" in error, error
        injection.mark.rmdir()
        is_found(folders, kind, go_on=True)
    tally(injected=number, fired=number)


def test_flips_find_a_mutant_out(begun: Begun, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    """A store that compares nothing."""
    history()
    folders = begun(KINDS[2])
    for path, offset, _ in seeded("a mutant").sample(regions_of(folders, "state"), 8):
        flip(path, offset + 3, 6)
    monkeypatch.setattr(CheckedStore, "verify", lambda *_: None)
    with pytest.raises(AssertionError, match="has other bits"):
        recover(folders, KINDS[2], FIRST_STEP)
    tally(mutants=1, caught=1)
