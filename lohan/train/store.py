"""`lohan store ACTION OUTPUT_DIR`: what a run has on its drives, its store and its checkpoints.

list     what is there: mode, step, sizes
verify   read all of it and compare it with its checksums; exit code 1 if anything is damaged
repair   mend what is damaged in the store from copies: folders of a copied store, or checkpoints (those of the run always)
remove   a checkpoint, or with --store the store: a run that has ended needs it no more
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from lohan.errors import OptionError
from lohan.train.arguments import from_dict, read_yaml
from lohan.train.config import TrainingConfig
from lohan.train.console import Console
from lohan.train.meter import size

if TYPE_CHECKING:
    from lohan.keep.store import Copy, Grain, StoredRun

ACTIONS = ("list", "verify", "repair", "remove")
EXIT_DAMAGED = 1
NUM_SHOWN = 10


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    config = config_of(Path(options.output_dir))
    if options.copies and options.action != "repair":
        raise OptionError(
            "from", options.copies, f"{options.action} reads no copies", "Leave it out, or use: lohan store repair"
        )
    with Console() as console:
        if options.action == "remove":
            return _remove(config, options, console)
        console.phase("open store")
        match options.action:
            case "list":
                return _list(config, console)
            case "verify":
                return _verify(config, console)
            case _:
                return _repair(config, [Path(copy) for copy in options.copies or ()], console)


def config_of(output_dir: Path) -> TrainingConfig:
    """What the run in a folder was set to."""
    if not (output_dir / "config.yaml").is_file():
        raise OptionError("OUTPUT_DIR", str(output_dir), "there is no run in it (config.yaml)", "Name a run's output_dir")
    return from_dict(read_yaml(output_dir / "config.yaml"))


def _list(config: TrainingConfig, console: Console) -> int:
    from lohan.keep.checkpoint import STATE_NAME
    from lohan.keep.manifest import CheckpointError, read_manifest
    from lohan.train.checkpoints import checkpoints_in

    lines = []
    if (run := _open(config)) is not None:
        with closing(run):
            lines.append(_described(run))
    for folder in checkpoints_in(config.checkpoint_folder):
        nbytes = size(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        try:
            what = f"model and state after step {read_manifest(folder / STATE_NAME).step}"
        except CheckpointError as error:
            what = f"damaged: {error}" if (folder / STATE_NAME).exists() else "model"
        lines.append(f"{folder}: {what}, {nbytes}")
    console.idle()
    for line in lines or [f"{config.output_dir}: neither a store nor checkpoints"]:
        console.line(line)
    return 0


def _described(run: StoredRun) -> str:
    from lohan.keep.store import store_bytes

    commit = run.commit
    waits = "" if commit.redo is None else f", updates of {len(commit.redo.present)} units to be made from its gradients"
    state = f"after step {commit.step}{waits}" if commit.whole else f"left while step {commit.step} was being overwritten"
    return f"{', '.join(map(str, run.folders))}: store {run.mode.value}, {state}, {size(store_bytes(run.folders))}"


def _verify(config: TrainingConfig, console: Console) -> int:
    from lohan.keep.checkpoint import STATE_NAME
    from lohan.keep.manifest import CheckpointError, read_manifest
    from lohan.keep.planes import verify_planes
    from lohan.train.checkpoints import checkpoints_in

    is_whole = True
    if (run := _open(config)) is not None:
        with closing(run):
            damaged = run.damaged(console.progress)
            console.idle()
            console.line(_described(run))
            is_whole = not damaged and run.commit.whole
            _tell_damage(run, damaged, console)
    for folder in checkpoints_in(config.checkpoint_folder):
        if not (folder / STATE_NAME).exists():
            continue
        try:
            manifest = read_manifest(folder / STATE_NAME)
            nbytes = verify_planes(folder / STATE_NAME, manifest, console.progress)
            told = f"whole, step {manifest.step}, {size(nbytes)} read"
        except CheckpointError as error:
            is_whole, told = False, f"damaged: {error}"
        console.idle()
        console.line(f"{folder}: {told}")
    return 0 if is_whole else EXIT_DAMAGED


def _tell_damage(run: StoredRun, damaged: Sequence[Grain], console: Console) -> None:
    num = sum(1 for _ in run.grains())
    if not damaged:
        console.line(f"    all {num} grains are what was written")
    for grain in damaged[:NUM_SHOWN]:
        path, offset = run.store.locate(grain.address)
        console.line(f"    damaged: {grain.extent.name}, {grain.nbytes} bytes at byte {offset} of {path}")
    if damaged:
        console.line(
            f"    {len(damaged)} of {num} grains are damaged. To mend them: lohan store repair, or go on from a checkpoint"
        )


def _repair(config: TrainingConfig, copies: Sequence[Path], console: Console) -> int:
    from lohan.keep.checkpoint import STATE_NAME
    from lohan.keep.store import CheckpointCopy, StoreCopy
    from lohan.ssd.durable import META_NAME
    from lohan.train.checkpoints import checkpoints_in

    run = _open(config)
    if run is None:
        raise OptionError("OUTPUT_DIR", config.output_dir, "its run has no store", "Name the output_dir of a run that has one")
    with ExitStack() as stack:
        stack.enter_context(closing(run))
        sources: list[Copy] = []
        if stores := [copy for copy in copies if (copy / META_NAME).exists()]:
            sources.append(stack.enter_context(closing(StoreCopy(stores, run))))
        folders = [*(copy for copy in copies if copy not in stores), *checkpoints_in(config.checkpoint_folder)]
        for folder in folders:
            state = folder / STATE_NAME if (folder / STATE_NAME).is_dir() else folder
            if folder in copies or state != folder:
                sources.append(CheckpointCopy(state, run))
        damaged = run.damaged(console.progress)
        left = []
        for number, grain in enumerate(damaged):
            console.progress("repair", number, len(damaged))
            if not run.mend(grain, sources):
                left.append(grain)
        console.idle()
        console.line(f"{len(damaged)} grains were damaged, {len(damaged) - len(left)} are mended")
        _tell_damage(run, left, console)
    return EXIT_DAMAGED if left else 0


def _remove(config: TrainingConfig, options: Namespace, console: Console) -> int:
    from lohan.keep.publish import remove
    from lohan.keep.store import store_bytes
    from lohan.ssd.durable import remove_store
    from lohan.train.checkpoints import PREFIX, checkpoints_in

    known = {folder.name.removeprefix(PREFIX): folder for folder in checkpoints_in(config.checkpoint_folder)}
    if unknown := [step for step in options.checkpoint or () if step not in known]:
        there = ", ".join(known) or "none"
        raise OptionError("checkpoint", unknown[0], "there is no checkpoint of that step", f"There are {there}")
    if not options.store and not options.checkpoint:
        raise OptionError("remove", config.output_dir, "nothing was named", "Say --checkpoint STEP, or --store")
    what = [str(known[step]) for step in options.checkpoint or ()] + (
        [f"the store in {config.drives}"] if options.store else []
    )
    if not options.yes and not (sys.stdin.isatty() and input(f"remove {', '.join(what)}? [y/N] ").lower() in ("y", "yes")):
        raise OptionError("yes", False, "nobody confirmed it", "Add --yes to remove without being asked")
    for step in options.checkpoint or ():
        nbytes = sum(path.stat().st_size for path in known[step].rglob("*") if path.is_file())
        remove(known[step])
        console.line(f"{known[step]}: removed, {size(nbytes)}")
    if options.store:
        nbytes = store_bytes(config.drives)
        remove_store(config.drives)
        console.line(f"{', '.join(map(str, config.drives))}: store removed, {size(nbytes)}")
    return 0


def _open(config: TrainingConfig) -> StoredRun | None:
    """The run's store; None if there is none."""
    from lohan.keep.store import StoredRun
    from lohan.ssd.durable import find_run

    return StoredRun(config.drives) if config.drives and find_run(config.drives) is not None else None


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lohan store", description="What a run has on its drives.", allow_abbrev=False)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("output_dir", help="of the run")
    parser.add_argument(
        "--from", dest="copies", nargs="+", metavar="FOLDER", help="repair: all folders of a copied store, or checkpoints"
    )
    parser.add_argument("--checkpoint", nargs="+", metavar="STEP", help="remove: the checkpoints of these steps")
    parser.add_argument("--store", action="store_true", help="remove: the store")
    parser.add_argument("--yes", action="store_true", help="remove: do not ask")
    return parser
