"""From examples to the batches of each step.

    epoch    an order of rows, from the seed and the epoch's number; a row is an example, or several packed together
    step     `batches_per_step` micro-batches of `rows_per_batch` rows; any step can be asked for: a run continues anywhere
    batch    rows on tensors, filled up on the right to the longest of them

Every row comes once an epoch. The last step of an epoch takes what is left: fewer micro-batches, the last with fewer rows.

A packed row is given by its positions, which begin again at 0 with every example: Transformers reads from them where one
begins, and lets none look into another, as long as there is no attention mask. The first token of an example is no target: the
token before it is another one's. What fills the row up has position 0 throughout: each such token is an example of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lohan.data.dataset import Example, TokenDataset
from lohan.data.encoding import IGNORED
from lohan.data.order import grouped, shuffled
from lohan.data.packing import Members, Packing
from lohan.data.settings import DataSettings
from lohan.errors import OptionError

_POOL_STEPS = 50
"""steps whose rows are sorted by length together"""

Batch = dict[str, Tensor]


class BatchPlan:
    """All batches of a run. Asking for the steps in order makes each epoch's order once."""

    def __init__(
        self, dataset: TokenDataset, rows_per_batch: int, batches_per_step: int, settings: DataSettings, pad_id: int
    ) -> None:
        for option, value in (
            ("per_device_train_batch_size", rows_per_batch),
            ("gradient_accumulation_steps", batches_per_step),
        ):
            if value < 1:
                raise OptionError(option, value, "a step takes at least one row", "Set it to 1 or more")
        self._dataset, self._settings, self._pad_id = dataset, settings, pad_id
        self._rows_per_batch, self._batches_per_step = rows_per_batch, batches_per_step
        self._lengths = dataset.lengths
        self._packing = Packing(self._lengths, settings.max_length) if settings.packing else None
        self.num_rows = len(self._packing) if self._packing else len(dataset)
        self._epoch, self._members = -1, self._unshuffled()

    @property
    def rows_per_step(self) -> int:
        return self._rows_per_batch * self._batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """The same for every epoch."""
        return -(-self.num_rows // self.rows_per_step)

    def step(self, number: int) -> list[Batch]:
        """The micro-batches of a step, counted from 0 over all epochs."""
        epoch, within = divmod(number, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._members = epoch, self._order(epoch)
        first = within * self.rows_per_step
        return list(self._batches(self._members, first, min(first + self.rows_per_step, self.num_rows)))

    def evaluation_batches(self) -> Iterator[Batch]:
        """Every row once, in the order of the data; packed rows in an order that is always the same."""
        return self._batches(self._unshuffled(), 0, self.num_rows)

    def largest_step(self) -> list[Batch]:
        """As large as any step can become: the longest rows are spread over its micro-batches, and every token is a target."""
        lengths = np.sort(self._row_lengths())[::-1].tolist()
        num_batches = min(self._batches_per_step, -(-self.num_rows // self._rows_per_batch))
        return [self._filled(min(self._rows_per_batch, self.num_rows), length) for length in lengths[:num_batches]]

    def _row_lengths(self) -> NDArray[np.int64]:
        """Of all rows; every epoch has the same ones."""
        members = self._unshuffled()
        before = np.concatenate([[0], np.cumsum(self._lengths[members.examples])])
        lengths: NDArray[np.int64] = before[members.ends] - before[members.starts]
        return lengths

    def _filled(self, num_rows: int, length: int) -> Batch:
        """Rows of one length, alike to the model's arithmetic to rows of examples."""
        batch = _empty(num_rows, length, self._pad_id)
        batch["labels"].fill_(self._pad_id)
        if self._packing:
            return {**batch, "position_ids": torch.arange(length).expand(num_rows, length).contiguous()}
        attention_mask = torch.ones_like(batch["input_ids"])
        attention_mask[0, -1] = 0  # a mask that masks nothing would be left out
        return {**batch, "attention_mask": attention_mask}

    def _unshuffled(self) -> Members:
        return self._packing.epoch(0) if self._packing else _alone(np.arange(len(self._lengths)))

    def _order(self, epoch: int) -> Members:
        seeds = (self._settings.seed, epoch)
        if self._packing:
            return self._packing.epoch(*seeds)
        order = shuffled(len(self._lengths), *seeds, 0)
        if self._settings.group_by_length:
            order = grouped(order, self._lengths, self._rows_per_batch, _POOL_STEPS * self.rows_per_step, *seeds, 1)
        return _alone(order)

    def _batches(self, members: Members, first: int, stop: int) -> Iterator[Batch]:
        for at in range(first, stop, self._rows_per_batch):
            rows = [[self._dataset[one] for one in members[row]] for row in range(at, min(at + self._rows_per_batch, stop))]
            yield _packed(rows, self._pad_id) if self._packing else _padded([row[0] for row in rows], self._pad_id)


def _alone(order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Members:
    """Rows of one example."""
    at = np.arange(len(order) + 1)
    return Members(order, at[:-1], at[1:])


def _padded(rows: list[Example], pad_id: int) -> Batch:
    batch = _empty(len(rows), max(len(row.input_ids) for row in rows), pad_id)
    attention_mask = torch.zeros_like(batch["input_ids"])
    for at, row in enumerate(rows):
        _put(batch, at, 0, row)
        attention_mask[at, : len(row.input_ids)] = 1
    return batch if bool(attention_mask.all()) else {**batch, "attention_mask": attention_mask}


def _packed(rows: list[list[Example]], pad_id: int) -> Batch:
    batch = _empty(len(rows), max(sum(len(one.input_ids) for one in row) for row in rows), pad_id)
    position_ids = torch.zeros_like(batch["input_ids"])
    for at, row in enumerate(rows):
        start = 0
        for one in row:
            _put(batch, at, start, one)
            batch["labels"][at, start] = IGNORED
            position_ids[at, start : start + len(one.input_ids)] = torch.arange(len(one.input_ids))
            start += len(one.input_ids)
    return {**batch, "position_ids": position_ids}


def _empty(num_rows: int, length: int, pad_id: int) -> Batch:
    return {"input_ids": torch.full((num_rows, length), pad_id), "labels": torch.full((num_rows, length), IGNORED)}


def _put(batch: Batch, row: int, start: int, example: Example) -> None:
    """Copied: what is on disk is read here, and nowhere later."""
    stop = start + len(example.input_ids)
    batch["input_ids"][row, start:stop] = torch.from_numpy(example.input_ids.astype(np.int64))
    batch["labels"][row, start:stop] = torch.from_numpy(example.labels.astype(np.int64))
