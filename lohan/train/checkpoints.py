"""Checkpoints to keep: folders `checkpoint-<step>` in output_dir, or in checkpoint_dir on another disk.

checkpoint-500/
    config.json, model.safetensors, tokenizer.json, ...    the model, as Transformers loads it
    trainer_state.json                                      what Transformers' Trainer writes of a run
    state/manifest.json, state/planes, state/log.jsonl      what the run goes on from; not with save_only_model

save   the step is drained and committed; everything is written beside its name, read back and compared; then it takes it
keep   when the newest is there, the oldest go, beyond save_total_limit
tidy   what a crash left half done goes when the run begins again
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.checksum import checksum
from lohan.engine import Engine
from lohan.errors import OptionError
from lohan.keep.checkpoint import STATE_NAME, find_checkpoint
from lohan.keep.manifest import CheckpointError, read_manifest
from lohan.keep.publish import publishing, remove, tidy
from lohan.ssd.durable import find_run
from lohan.train.callbacks import Callbacks
from lohan.train.config import TrainingConfig
from lohan.train.console import Console
from lohan.train.inputs import Inputs
from lohan.train.log import LOG_NAME, RunLog
from lohan.train.run_wear import on_same_drives

PREFIX = "checkpoint-"
_NAME = re.compile(rf"{PREFIX}(\d+)")


@dataclass(slots=True)
class Checkpoints:
    """Those of one run."""

    config: TrainingConfig
    engine: Engine
    inputs: Inputs
    callbacks: Callbacks
    log: RunLog
    console: Console
    worn_bytes: int = 0
    """written by this process, where that wears the run's own drives"""

    @property
    def folder(self) -> Path:
        return self.config.checkpoint_folder

    def begin(self, num_steps: int) -> None:
        """Before the first step: what is there is this run's, and there is room for what is to come."""
        if self.folder.is_dir():
            tidy(self.folder, PREFIX)
        self._check_owner()
        self._check_room(num_steps)

    def save(self, step: int) -> Path:
        """The run as it stands, whole and verified on return; then the oldest go."""
        folder = self.folder / f"{PREFIX}{step}"
        self.console.phase(f"save {folder}")
        with publishing(folder) as partial:
            tensors = self.inputs.save(self.engine, partial)
            self.callbacks.state.save_to_json(str(partial / "trainer_state.json"))
            if not self.config.save_only_model:
                log = self.log.path.read_bytes()
                files = {name: checksum((partial / name).read_bytes()) for name in _small_files(partial)}
                notes = {"model": self.inputs.model_name, "tensors": tensors, "files": {**files, _LOG: checksum(log)}}
                self.engine.save_state(partial / STATE_NAME, notes=notes)
                (partial / _LOG).write_bytes(log)
        if on_same_drives(folder, self.config.drives):
            self.worn_bytes += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self.console.idle()
        for old in self._beyond_limit(folder):
            remove(old)
        return folder

    def _beyond_limit(self, newest: Path) -> list[Path]:
        """By age: a run that went back has steps that count less and are newer."""
        limit = self.config.save_total_limit
        others = sorted((path for path in checkpoints_in(self.folder) if path != newest), key=lambda p: p.stat().st_mtime_ns)
        return others[: max(0, len(others) + 1 - limit)] if limit is not None else []

    def _check_owner(self) -> None:
        for path in checkpoints_in(self.folder):
            try:
                run = read_manifest(path / STATE_NAME).run
            except CheckpointError:
                continue
            if run != self.engine.run_id:
                option = "checkpoint_dir" if self.config.checkpoint_dir is not None else "output_dir"
                remedy = "Name another folder, or remove it; to go on with that run, set resume_from_checkpoint to it"
                raise OptionError(option, str(self.folder), f"{path.name} in it is of another run", remedy)

    def _check_room(self, num_steps: int) -> None:
        """A disk that fills up in the middle of the night is told of now."""
        every, limit = self.config.save_steps, self.config.save_total_limit
        num_left = (self.inputs.num_steps // every - num_steps // every) if every else 0
        num_left += self.config.save_first_step and num_steps == 0 and every != 1
        num_there = len(checkpoints_in(self.folder))
        num = num_left if limit is None else min(num_left, max(1, limit + 1 - num_there))
        each = self.engine.model_bytes + (0 if self.config.save_only_model else self.engine.state_bytes)
        place = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        if num * each > free:
            reason = f"{num} checkpoints of {each} bytes each need {num * each} bytes in {self.folder}, {free} are free"
            remedy = "Set save_total_limit, a larger save_steps, save_only_model, or checkpoint_dir to a folder on another disk"
            raise OptionError("save_steps", every, reason, remedy)


_LOG = f"{STATE_NAME}/{LOG_NAME}"


def checkpoints_in(folder: Path) -> list[Path]:
    """All that have their names, by step."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir() and not path.is_symlink()]


def chosen_checkpoint(config: TrainingConfig) -> Path | None:
    """What the run begins with: what the user names, or without a store the newest checkpoint; checked before anything else."""
    named = config.resume_from_checkpoint
    if isinstance(named, str):
        try:
            return find_checkpoint(named).folder
        except OptionError as error:
            there = [path.name for path in checkpoints_in(Path(named).parent) if (path / STATE_NAME).is_dir()]
            raise OptionError(
                error.option, named, error.reason, f"{error.remedy}. There are {', '.join(there) or 'none'}"
            ) from None
    if named and (config.placement == "memory" or _is_spoiled(config.drives)):
        with_state = [path for path in checkpoints_in(config.checkpoint_folder) if (path / STATE_NAME).is_dir()]
        return find_checkpoint(with_state[-1]).folder if with_state else None
    return None


def _is_spoiled(drives: Sequence[Path]) -> bool:
    """Whether a store with one place a unit was left in the middle of a step."""
    found = find_run(drives)
    return found is not None and not found.whole


def _small_files(folder: Path) -> list[str]:
    """All that are no weights: configuration, tokenizer, trainer_state.json."""
    return [name for name in sorted(os.listdir(folder)) if (folder / name).is_file() and not name.endswith(".safetensors")]
