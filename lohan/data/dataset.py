"""`tokenize`: rows to tokens, once. What was made is kept, and is taken again if nothing that it depends on has changed.

key       rows, tokenizer, settings, version: is there a cache of that name?
first     the first row says which format all rows have
encode    rows in small groups
fit       too long: cut, split, dropped or refused; without a target: dropped. All of it is counted
publish   the cache gets its name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lohan.data.cache import CacheFiles, CacheWriter, open_cache, writing
from lohan.data.encoding import IGNORED, Array, Encoded, Encoder
from lohan.data.fingerprint import cache_key
from lohan.data.formats import Format, recognise
from lohan.data.rows import Row, Rows
from lohan.data.settings import DataSettings
from lohan.errors import OptionError

Progress = Callable[[str, int, int | None], None]
"""phase, done, total; in rows where their number is known, else in bytes of the files"""

_GROUP_ROWS, _GROUP_CHARACTERS = 64, 1 << 22


@dataclass(frozen=True, slots=True)
class Example:
    """One example: views of the memory map, which nobody can write to."""

    input_ids: Array
    labels: Array


@dataclass(slots=True)
class Counts:
    """What became of the rows."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    targets: int = 0
    largest_token: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    """for being too long"""
    without_targets: int = 0
    """dropped, because there is nothing to learn from them"""
    crossed: int = 0
    """a token reaches from what is given into the answer"""


class TokenDataset:
    """Examples of tokens. `notes` says in plain words what was done to the rows that a reader might not expect."""

    def __init__(self, files: CacheFiles, *, reused: bool) -> None:
        self._files = files
        self.reused = reused
        self.folder = files.folder
        self.format: str = files.about["format"]
        self.counts = Counts(**{name: files.about[name] for name in Counts.__slots__})
        self.notes: tuple[str, ...] = tuple(files.about["notes"])

    def __len__(self) -> int:
        return len(self._files.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        start, stop = self._files.offsets[index % len(self)], self._files.offsets[index % len(self) + 1]
        return Example(self._files.input_ids[start:stop], self._files.labels[start:stop])

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example."""
        return np.diff(self._files.offsets)

    def __str__(self) -> str:
        counts = self.counts
        tokens = f"{counts.tokens} tokens, {counts.targets} of them targets"
        return f"{counts.examples} examples from {counts.rows} rows ({self.format}), {tokens}"


def tokenize(
    rows: Rows, tokenizer: Any, settings: DataSettings, cache_dir: str | Path, progress: Progress | None = None
) -> TokenDataset:
    """The tokens of all rows."""
    tell = progress or (lambda phase, done, total: None)
    tell("tokenise", 0, rows.total)
    folder = Path(cache_dir)
    key = cache_key(rows, tokenizer, settings)
    if (files := open_cache(folder, key)) is not None:
        return TokenDataset(files, reused=True)
    stream = rows.read()
    first = next(stream, None)
    if first is None:
        raise OptionError("dataset_name", rows.name, "there are no rows in it", "Name data that has some")
    format = recognise([*first.values], rows.name, "text" if rows.is_text else settings.text_field)
    encoder = Encoder(tokenizer, settings, format)
    with writing(folder) as writer:
        maker = _Maker(writer, settings)
        for group in _groups(chain([first], stream)):
            for encoded in encoder.encode(group):
                maker.take(encoded)
            tell("tokenise", group[-1].position, rows.total)
        counts = maker.counts
        if not counts.examples:
            raise OptionError(
                "dataset_name", rows.name, "no row is left", " ".join(_notes(counts, settings, format, first, tokenizer))
            )
        about = {"format": format.name, "notes": _notes(counts, settings, format, first, tokenizer), **asdict(counts)}
        files = writer.publish(folder, key, about)
    return TokenDataset(files, reused=False)


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows that are tokenised together: few enough to be held in memory, whatever they contain."""
    group: list[Row] = []
    characters = 0
    for row in rows:
        group.append(row)
        characters += sum(len(value) for value in row.values.values() if isinstance(value, str))
        if len(group) == _GROUP_ROWS or characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


class _Maker:
    """Fits examples and writes them."""

    def __init__(self, writer: CacheWriter, settings: DataSettings) -> None:
        self._writer, self._settings = writer, settings
        self.counts = Counts()

    def take(self, encoded: Encoded) -> None:
        self.counts.rows += 1
        self.counts.crossed += encoded.crossed
        for input_ids, labels in self._fit(encoded):
            # A label is the target of the token before it: the first one is nobody's.
            num_targets = int((labels[1:] != IGNORED).sum())
            if not num_targets:
                self.counts.without_targets += 1
                continue
            self._writer.append(input_ids, labels)
            self.counts.examples += 1
            self.counts.tokens += len(input_ids)
            self.counts.targets += num_targets
            self.counts.largest_token = max(self.counts.largest_token, int(input_ids.max()), int(labels.max()))

    def _fit(self, encoded: Encoded) -> Sequence[tuple[Array, Array]]:
        """The example as it is, or what becomes of one that is too long."""
        ids, labels, limit = encoded.input_ids, encoded.labels, self._settings.max_length
        if len(ids) <= limit:
            return [(ids, labels)]
        match self._settings.too_long:
            case "truncate":
                self.counts.truncated += 1
                return [(ids[:limit], labels[:limit])]
            case "split":
                self.counts.split += 1
                return [(ids[at : at + limit], labels[at : at + limit]) for at in range(0, len(ids), limit)]
            case "drop":
                self.counts.dropped += 1
                return []
        reason = f"{encoded.row.source} {encoded.row.where} has {len(ids)} tokens"
        raise OptionError(
            "max_length",
            limit,
            reason,
            f"Set it to {len(ids)} or more, shorten that row, or set too_long to truncate, split or drop",
        )


def _notes(counts: Counts, settings: DataSettings, format: Format, first: Row, tokenizer: Any) -> list[str]:
    """What a reader might not expect."""
    long = f"of {counts.rows} rows were longer than max_length={settings.max_length}"
    notes = [
        (counts.truncated, f"{counts.truncated} {long} and were cut."),
        (counts.split, f"{counts.split} {long} and were split."),
        (counts.dropped, f"{counts.dropped} {long} and were dropped."),
        (counts.without_targets, f"{counts.without_targets} examples without a target were dropped: they teach nothing."),
        (
            counts.crossed,
            f"In {counts.crossed} of {counts.rows} rows a token reaches from the prompt into the answer; it counts as answer.",
        ),
    ]
    told = [text for count, text in notes if count]
    if format.name == "text" and tokenizer.eos_token_id is None:
        told.append("The tokenizer has no end token, so no text is ended by one.")
    if unused := [name for name in first.values if name not in (*format.needed, *format.optional)]:
        told.append(f"Columns that are not used: {', '.join(unused)}.")
    return told
