"""Whose state a checkpoint holds, of which step, and what every byte of it has to be: `manifest.json`, beside `planes`.

    planes     the planes of every unit, one behind the other, in pieces of up to PIECE_ELEMENTS elements:
               trainable weights, rest of the master, optimizer's planes, frozen weights
    manifest   run, step, fingerprint, the units' sizes, and a checksum of every piece; and a digest of all of that

The layout does not depend on plan, mode or number of drives: a run may go on from it with others. A manifest is data from
outside: every field is checked, and whatever is not as `write` makes it is a CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan.errors import LohanError
from lohan.model.shape import grain_of

MANIFEST_NAME, PLANES_NAME = "manifest.json", "planes"
FORMAT = 1
MAX_BYTES = 64 * 2**20
PIECE_ELEMENTS = 2**20
_BLOCK_ELEMENTS = 4096
_MOST_ELEMENTS, _MOST_PLANES = 2**50, 16


class CheckpointError(LohanError):
    """A checkpoint that is damaged, or that is none."""


@dataclass(frozen=True, slots=True)
class UnitSize:
    """What a unit has in a checkpoint."""

    name: str
    trainable: int
    """elements, padding included"""
    frozen: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of elements of one plane of one unit."""

    unit: int
    plane: int
    """0: trainable weights; from 1: planes of state; -1: frozen weights"""
    first: int
    num: int
    element_bytes: int
    offset: int
    """in the file"""

    @property
    def nbytes(self) -> int:
        return self.num * self.element_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Where what lies in `planes`."""

    weight_bytes: int
    """of an element"""
    state_bytes: tuple[int, ...]
    """of an element of each plane of state: the rest of the master, then the optimizer's"""
    units: tuple[UnitSize, ...]

    @property
    def nbytes(self) -> int:
        each = self.weight_bytes + sum(self.state_bytes)
        return sum(unit.trainable * each + unit.frozen * self.weight_bytes for unit in self.units)

    @property
    def grain_elements(self) -> int:
        """See `grain_of`."""
        return grain_of(max((max(unit.trainable, unit.frozen) for unit in self.units), default=0))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        units = [[unit.name, unit.trainable, unit.frozen] for unit in self.units]
        return {"weight_bytes": self.weight_bytes, "state_bytes": list(self.state_bytes), "units": units}

    def pieces(self) -> Iterator[Piece]:
        """All of the file, in order."""
        at = 0
        for index, unit in enumerate(self.units):
            planes = [(plane, size, unit.trainable) for plane, size in enumerate((self.weight_bytes, *self.state_bytes))]
            for plane, size, total in [*planes, (-1, self.weight_bytes, unit.frozen)]:
                for first in range(0, total, PIECE_ELEMENTS):
                    piece = Piece(index, plane, first, min(PIECE_ELEMENTS, total - first), size, at)
                    at += piece.nbytes
                    yield piece


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a checkpoint without its planes."""

    run: str
    """of the run, and of all that go on from it"""
    step: int
    fingerprint: Mapping[str, Any]
    layout: Layout
    checksums: Sequence[int]
    """of each piece"""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """of whoever wrote it"""

    @property
    def identity(self) -> str:
        """Of this very checkpoint."""
        return hashlib.blake2b(_text(self).encode(), digest_size=16).hexdigest()

    def write(self, folder: Path) -> None:
        (folder / MANIFEST_NAME).write_text(
            json.dumps({"manifest": json.loads(_text(self)), "digest": self.identity}, indent=1) + "\n", encoding="utf-8"
        )


def read_manifest(folder: Path) -> Manifest:
    """CheckpointError for what is not a whole manifest."""
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: longer than the {MAX_BYTES} bytes that a manifest may have")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: there is no state of a run in it ({path.name}: {error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not the text of a manifest: {error}") from error
    return parse_manifest(path, text)


def parse_manifest(path: Path, text: str) -> Manifest:
    """A manifest from its text; `path` is for errors."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not the JSON of a manifest: {error}") from error
    content = _field(path, whole, "manifest", dict)
    if (version := content.get("format")) != FORMAT:
        raise CheckpointError(f"{path}: of format {version!r}; this lohan reads format {FORMAT}")
    manifest = Manifest(
        run=_field(path, content, "run", str),
        step=_number(path, content, "step", 2**62),
        fingerprint=_field(path, content, "fingerprint", dict),
        layout=parse_layout(path, _field(path, content, "layout", dict)),
        checksums=_checksums(path, _field(path, content, "checksums", str)),
        notes=_field(path, content, "notes", dict),
    )
    num_pieces = sum(
        -(-num // PIECE_ELEMENTS) for unit in manifest.layout.units for num in _plane_lengths(unit, manifest.layout)
    )
    if len(manifest.checksums) != num_pieces:
        raise CheckpointError(f"{path}: {len(manifest.checksums)} checksums for {num_pieces} pieces")
    if manifest.identity != _field(path, whole, "digest", str):
        raise CheckpointError(f"{path}: its digest is another one: it is damaged, or was changed")
    return manifest


def _plane_lengths(unit: UnitSize, layout: Layout) -> list[int]:
    return [unit.trainable] * (1 + len(layout.state_bytes)) + [unit.frozen]


def _text(manifest: Manifest) -> str:
    """What the digest is of."""
    content = {
        "format": FORMAT,
        "run": manifest.run,
        "step": manifest.step,
        "fingerprint": manifest.fingerprint,
        "layout": manifest.layout.to_dict(),
        "checksums": "".join(f"{number:08x}" for number in manifest.checksums),
        "notes": manifest.notes,
    }
    return json.dumps(content, sort_keys=True)


def parse_layout(path: Path, content: Mapping[str, Any]) -> Layout:
    """What `Layout.to_dict` made; CheckpointError for anything else."""
    state, units = _field(path, content, "state_bytes", list), _field(path, content, "units", list)
    sizes = [_number(path, content, "weight_bytes", 8), *(_checked(path, "state_bytes", size, 8) for size in state)]
    if len(sizes) > _MOST_PLANES or 0 in sizes:
        raise CheckpointError(f"{path}: state_bytes is {state!r}")
    found = []
    for unit in units:
        if not (isinstance(unit, list) and len(unit) == 3 and isinstance(unit[0], str)):
            raise CheckpointError(f"{path}: a unit is {unit!r}")
        lengths = [_checked(path, "units", num, _MOST_ELEMENTS) for num in unit[1:]]
        if any(num % _BLOCK_ELEMENTS for num in lengths):
            raise CheckpointError(f"{path}: unit {unit[0]!r} has {lengths} elements, no multiples of {_BLOCK_ELEMENTS}")
        found.append(UnitSize(unit[0], *lengths))
    return Layout(sizes[0], tuple(sizes[1:]), tuple(found))


def _checksums(path: Path, text: str) -> list[int]:
    if len(text) % 8 or not re.fullmatch("[0-9a-f]*", text):
        raise CheckpointError(f"{path}: checksums are not numbers of 8 digits each")
    return [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]


def _field(path: Path, content: Any, name: str, kind: type) -> Any:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: {name} is missing, or is not what a manifest has there")
    return value


def _number(path: Path, content: Mapping[str, Any], name: str, most: int) -> int:
    return _checked(path, name, content.get(name), most)


def _checked(path: Path, name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(f"{path}: {name} is {value!r}")
    return value
