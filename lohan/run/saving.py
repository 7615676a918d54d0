"""How an engine's state leaves it.

drain    what is pending is applied and durable
save     as a model that Transformers loads, or as a checkpoint to go on from; both read back and compared
close    what runs is finished, everything given back
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from lohan.keep.checkpoint import save_state
from lohan.model.weights_out import export
from lohan.run.places import layout_of
from lohan.run.starting import Starting
from lohan.run.transfer import Exporter


class Saving(Starting):
    """An engine whose state can be saved, and that can be closed."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps done so far, those of earlier processes included; skipped ones do not count."""
        return self._ready().training.step

    def drain(self) -> None:
        """Apply what is pending. On return the last step is what a crash would come back to."""
        self._drain_current()
        self._ready().training.commit()

    def save_pretrained(
        self, out_dir: str | Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
    ) -> dict[str, int]:
        """Write a model that Transformers loads: the source's dtype (or `dtype`), from the fp32 masters.

        All of it is read back and compared before the files take their names. Returns the checksum of each tensor.
        """
        return export(self._opened, self._exporter().tensor, out_dir, dtype=dtype, max_shard_bytes=max_shard_bytes)

    def save_state(self, folder: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
        """Write all that a run goes on from (`checkpoint=`), read it back and compare it; whole or not there.

        `notes`, as JSON has them, go into its manifest.
        """
        self.drain()
        training, preparer = self._ready().training, self._ready().preparer
        save_state(
            folder,
            self._state_of(preparer),
            layout_of(preparer.shape, self.sizes),
            run_id=self.run_id,
            step=training.step,
            fingerprint=self._fingerprint(preparer.shape),
            notes=notes or {},
            progress=self._progress,
        )

    @property
    def state_bytes(self) -> int:
        """What `save_state` writes."""
        return layout_of(self.shape, self.sizes).nbytes

    @property
    def model_bytes(self) -> int:
        """What `save_pretrained` writes, if it is not told another dtype."""
        return sum(spec.num_bytes for spec in self._opened.stored.values())

    @property
    def run_id(self) -> str:
        """Of this run and of all that go on from its checkpoints."""
        self._ready()
        return self._storage.run_id if self._storage is not None else self._run_id

    def read_parameter(self, name: str) -> Tensor:
        """The fp32 master of a trainable parameter, the weight of a frozen one."""
        return self._exporter().tensor(name)

    def _exporter(self) -> Exporter:
        self.drain()
        return Exporter(self.map, self.numerics, self._ready().units.read_unit)

    def close(self) -> None:
        """Finish what runs, give everything back. The store's files stay. Raises what went wrong since the last call."""
        if self._closed:
            return
        self._closed = True
        started = self._started
        with ExitStack() as last_first:
            last_first.callback(self._memory.close)
            last_first.callback(self.device.close)
            if self._storage is not None:
                last_first.callback(self._storage.close)
            if started is not None:
                last_first.callback(started.training.close)
            last_first.callback(self._executor.close)
            if started is not None:
                last_first.callback(started.runner.close)
            if started is not None and started.preparer.current is not None and not self._executor.is_told:
                self._executor.admit()
                started.training.drain(started.preparer.current)
                started.training.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """An error of the block counts for more than one of closing after it."""
        try:
            self.close()
        except Exception as another:
            if error is None:
                raise
            error.add_note(f"closing the engine failed as well: {another!r}")
