"""What can be refused before anything is read or written: the drives, the model's folder, its tokenizer."""

from __future__ import annotations

import errno
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from lohan.errors import ModelError, OptionError
from lohan.model.folder import CONFIG_NAME, check_layers, read_config, read_entries, read_side_files, resolve
from lohan.train.config import TrainingConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab*", "*.model", "*.tiktoken")


def check_folders(config: TrainingConfig) -> None:
    """The run's folder and the store's can be made where they are to be; nothing is made yet."""
    if config.folder.exists() and not config.folder.is_dir():
        raise OptionError("output_dir", config.output_dir, "it is a file", "Name a folder; it is made if it is missing")
    _check_writable("output_dir", config.folder)
    for named, folder in zip(config.ssd or [""] * len(config.drives), config.drives, strict=True):
        if named and not folder.absolute().parent.is_dir():
            reason = f"there is no folder {folder.absolute().parent}"
            raise OptionError("ssd", named, reason, "Name a folder on a mounted drive, or make that one first")
        _check_direct(folder)


def _existing(folder: Path) -> Path:
    """The folder, or the one above it in which it would be made."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def _check_writable(option: str, folder: Path) -> None:
    place = _existing(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OptionError(
            option, str(folder), f"{place} is not a folder that you may write to", "Name one that you may write to"
        )


def _check_direct(folder: Path) -> None:
    """A drive, and one that knows O_DIRECT: tried with a file that has no name."""
    _check_writable("ssd", folder)
    place = _existing(folder)
    if (kind := _filesystem(place)) in ("tmpfs", "ramfs"):
        raise OptionError("ssd", str(folder), f"it is on {kind}, which is RAM and no drive", "Name a folder on an SSD")
    try:
        os.close(os.open(place, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno == errno.EINVAL:
            reason = "the filesystem there has no O_DIRECT"
            raise OptionError("ssd", str(folder), reason, "Name a folder on ext4 or XFS") from error
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # no files without a name there: the store will find out
            reason = f"no file can be made there ({error.strerror})"
            raise OptionError("ssd", str(folder), reason, "Name a folder that you may write to") from error


def _filesystem(place: Path) -> str:
    """The type of the filesystem that is mounted last on the way to `place`."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(Path(point).parts), kind) for point, kind in mounts if place.resolve().is_relative_to(point)]
    return max(above, key=lambda mount: mount[0], default=(0, "unknown"))[1]


def check_model(source: str | Path) -> tuple[Path, PreTrainedConfig]:
    """The model's folder and configuration, once its weight files have been found to be there and safe."""
    folder = resolve(source)
    config = read_config(folder)
    check_layers(folder / CONFIG_NAME, config.to_dict(), len(read_entries(folder)))
    read_side_files(folder)
    return folder, config


def check_length(config: TrainingConfig, model_config: PreTrainedConfig | None) -> None:
    text_config = model_config.get_text_config() if model_config is not None else None
    most = getattr(text_config, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < config.max_length:
        reason = f"the model has positions for {most} tokens"
        raise OptionError(
            "max_length", config.max_length, reason, f"Set it to {most} or less; too_long says what becomes of the rest"
        )


def open_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a model's folder; none if there are no files of one."""
    if not any(fnmatch(path.name, pattern) for path in folder.iterdir() for pattern in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise ModelError(f"{folder}: its tokenizer cannot be opened: {error}") from error
