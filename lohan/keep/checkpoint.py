"""Saving a run's state as a folder, and beginning a run from one.

save    planes, manifest; then all is read back and compared; then the folder takes its name
begin   the manifest fits the run; every piece is compared before the run gets it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.errors import OptionError
from lohan.keep.manifest import CheckpointError, Layout, Manifest, read_manifest
from lohan.keep.planes import Progress, RunState, load_planes, save_planes, verify_planes
from lohan.keep.publish import publishing
from lohan.ssd.durable import Origin, differences

STATE_NAME = "state"
"""the part of a checkpoint that lohan goes on from, beside the model"""
OPTION = "resume_from_checkpoint"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole one, found on a drive."""

    folder: Path
    """with manifest and planes"""
    manifest: Manifest

    @property
    def origin(self) -> Origin:
        """What a store remembers that begins with it."""
        return Origin(self.manifest.run, self.manifest.identity)

    def check_fits(self, layout: Layout, fingerprint: Mapping[str, Any]) -> None:
        """OptionError unless a run like this one goes on from it with the same bits."""
        if found := differences(self.manifest.fingerprint, fingerprint):
            reason = f"it is of another run: {'; '.join(found)}"
            raise OptionError(OPTION, str(self.folder), reason, "Use its settings, or train anew from the model beside it")
        if layout != self.manifest.layout:
            raise OptionError(OPTION, str(self.folder), "its units have other sizes than this run's", "Name another one")

    def load(self, run: RunState, progress: Progress) -> None:
        load_planes(self.folder, self.manifest, run, progress)


def find_checkpoint(folder: str | Path) -> Checkpoint:
    """What a user names: a checkpoint's folder, or the state in it. OptionError with what is there instead."""
    given = Path(folder)
    state = given / STATE_NAME if (given / STATE_NAME).is_dir() else given
    try:
        return Checkpoint(state, read_manifest(state))
    except CheckpointError as error:
        if not given.is_dir():
            reason, remedy = "there is no such folder", "Name a checkpoint-<step> of a run"
        elif (given / "config.json").is_file() and state == given:
            reason = "it holds a model only, and no optimizer state to go on with"
            remedy = "Name a checkpoint that was saved without save_only_model, or train anew from it (model_name_or_path)"
        else:
            reason, remedy = str(error), "Name another checkpoint-<step>"
        raise OptionError(OPTION, os.fspath(folder), reason, remedy) from error


def save_state(
    folder: str | Path,
    run: RunState,
    layout: Layout,
    *,
    run_id: str,
    step: int,
    fingerprint: Mapping[str, Any],
    notes: Mapping[str, Any],
    progress: Progress,
) -> Manifest:
    """A folder with all that a run goes on from; it is there when it has been verified, and not before."""
    with publishing(Path(folder)) as partial:
        partial.chmod(0o700)
        checksums = save_planes(partial, layout, run, progress)
        manifest = Manifest(run_id, step, fingerprint, layout, checksums, notes)
        manifest.write(partial)
        verify_planes(partial, read_manifest(partial), progress)
    return manifest
