"""Every write and flush of a run in order, and the disks that a power cut could have left at any moment.

recorded   a run whose system calls on named files are kept: names, sizes, writes with their bytes, flushes, and what
           was acknowledged. Each has two ticks, of when it began and when it returned
image      the disks at a tick. A write is safe if it returned before a flush of its file began that returned by then; of
           all others a random choice of sectors arrived, in whatever order. Likewise a name and its folder
"""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.faults.harness import Kind
from tests.faults.injection import both
from tests.faults.processes import Fault, Tell, launch, nothing, train

SECTOR_BYTES = 512
"""what a drive writes as a whole"""


@dataclass(slots=True)
class Event:
    """A system call."""

    what: str
    """`write`, `size`, `sync`, `name` (a file gets one) or `committed`"""
    began: int
    ended: int = 2**62
    inode: int = 0
    offset: int = 0
    """of a write; the new size; the step that was committed"""
    data: bytes = b""
    path: str = ""
    source: str = ""
    """of a name that was another before"""


@dataclass(slots=True)
class Recording:
    """What a run did to its folders, and what was there before."""

    files: dict[str, tuple[int, bytes]]
    """path -> inode, content"""
    folders: dict[int, str]
    """inode -> path"""
    events: list[Event] = field(default_factory=list)

    @property
    def num_ticks(self) -> int:
        return max(event.began for event in self.events) + 2

    def tick(self, chance: random.Random) -> int:
        """Any, or, as often, one around a flush, where the order of things matters most."""
        around = chance.choice([event for event in self.events if event.what == "sync"]).began + chance.randint(-3, 3)
        return max(0, around) if chance.random() < 0.5 else chance.randrange(self.num_ticks)

    def acknowledged(self, tick: int) -> int:
        """The last step that was called committed by then."""
        return max((e.offset for e in self.events if e.what == "committed" and e.began <= tick), default=-1)

    def image(self, tick: int, chance: random.Random) -> dict[str, bytes]:
        """Path -> content, as a power cut at that tick could leave it."""
        safe_until: dict[int, int] = {}
        for event in self.events:
            if event.what == "sync" and event.ended <= tick:
                safe_until[event.inode] = max(safe_until.get(event.inode, -1), event.began)
        contents = {inode: bytearray(content) for inode, content in self.files.values()}
        for event in self.events:
            if event.what in ("write", "size") and event.began <= tick:
                content = contents.setdefault(event.inode, bytearray())
                is_safe = event.ended < safe_until.get(event.inode, -1)
                _apply(event, content, None if is_safe else chance)
        names = {path: inode for path, (inode, _) in self.files.items()}
        for event in self._names(tick, safe_until, chance):
            names.pop(event.source, None)
            names[event.path] = event.inode
        return {path: bytes(contents.get(inode, b"")) for path, inode in names.items()}

    def _names(self, tick: int, safe_until: dict[int, int], chance: random.Random) -> list[Event]:
        """The names that arrived: those before a flush of their folder, and some of those after, in order."""
        arrived = []
        for inode, folder in self.folders.items():
            events = [e for e in self.events if e.what == "name" and e.began <= tick and os.path.dirname(e.path) == folder]
            safe = [event for event in events if event.ended < safe_until.get(inode, -1)]
            arrived += events[: chance.randint(len(safe), len(events))]
        return sorted(arrived, key=lambda event: event.began)


def _apply(event: Event, content: bytearray, chance: random.Random | None) -> None:
    """All of a write, or, with chance, some of its sectors."""
    if event.what == "size":
        if chance is None or chance.random() < 0.5:
            content.extend(bytes(max(0, event.offset - len(content))))
            del content[event.offset :]
        return
    share = 1.0 if chance is None else chance.choice((0.0, 0.5, 0.5, 1.0))
    for start in range(0, len(event.data), SECTOR_BYTES):
        if share == 1.0 or (chance is not None and chance.random() < share):
            sector = event.data[start : start + SECTOR_BYTES]
            end = event.offset + start + len(sector)
            content.extend(bytes(max(0, end - len(content))))
            content[event.offset + start : end] = sector


def write_image(image: dict[str, bytes], was: Path, folder: Path) -> None:
    """An image of a run that was in `was`, in another folder."""
    for path, content in image.items():
        target = folder / Path(path).relative_to(was)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(content)


# ---------------------------------------------------------------- recording


def record(folders: Sequence[Path], kind: Kind, upto: int, into: Path, fault: Fault = nothing) -> Recording:
    """A run in a process of its own."""
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    child = launch(_recorded, into, folders, kind, fault, upto).go()
    assert child.finish() == 0, child.error
    recording: Recording = pickle.loads(into.read_bytes())
    return recording


def _recorded(tell: Tell, into: Path, folders: Sequence[Path], kind: Kind, fault: Fault, upto: int) -> None:
    recorder = Recorder(folders)

    def tell_and_note(what: str, value: Any) -> None:
        if what == "committed":
            recorder.note(Event("committed", recorder.tick(), offset=value))
        tell(what, value)

    train(tell_and_note, folders, kind, partial(both, recorder.begin, fault), upto)
    into.write_bytes(pickle.dumps(recorder.recording))


class Recorder:
    """Stands between the run and `os`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
        self.recording = Recording(
            {str(path): (path.stat().st_ino, path.read_bytes()) for path in files},
            {folder.stat().st_ino: str(folder) for folder in folders},
        )
        self._known = {inode for inode, _ in self.recording.files.values()}
        self._ticks, self._lock = count(), threading.Lock()
        self._paths: dict[int, bool] = {}

    def tick(self) -> int:
        return next(self._ticks)

    def note(self, event: Event) -> None:
        self.recording.events.append(event)

    def begin(self) -> None:
        real = {name: getattr(os, name) for name in ("open", "pwritev", "pwrite", "fdatasync", "fsync", "rename")}
        real |= {name: getattr(os, name) for name in ("ftruncate", "posix_fallocate")}

        def opened(path: Any, flags: int, mode: int = 0o777) -> int:
            with self._lock:
                began = self.tick()
                fd: int = real["open"](path, flags, mode)
                inode = os.fstat(fd).st_ino
                if flags & os.O_CREAT and inode not in self._known:
                    self._known.add(inode)
                    self.note(Event("name", began, self.tick(), inode, path=os.fspath(path)))
            return fd

        def renamed(source: Any, target: Any) -> None:
            inode = os.stat(source).st_ino
            with self._event("name", inode=inode, path=os.fspath(target), source=os.fspath(source)):
                real["rename"](source, target)

        def vector(fd: int, views: list[Any], offset: int) -> int:
            data = b"".join(bytes(view) for view in views)
            with self._event("write", fd, offset=offset, data=data):
                moved: int = real["pwritev"](fd, views, offset)
            return moved

        def page(fd: int, data: bytes, offset: int) -> int:
            with self._event("write", fd, offset=offset, data=bytes(data)):
                moved: int = real["pwrite"](fd, data, offset)
            return moved

        def sized(name: str, last: int) -> Callable[..., None]:
            def call(fd: int, *arguments: int) -> None:
                with self._event("size", fd, offset=arguments[last]):
                    real[name](fd, *arguments)

            return call

        def synced(name: str) -> Callable[[int], None]:
            def call(fd: int) -> None:
                with self._event("sync", fd):
                    real[name](fd)

            return call

        for name, replacement in {
            "open": opened,
            "rename": renamed,
            "pwritev": vector,
            "pwrite": page,
            "ftruncate": sized("ftruncate", 0),
            "posix_fallocate": sized("posix_fallocate", 1),
            "fdatasync": synced("fdatasync"),
            "fsync": synced("fsync"),
        }.items():
            setattr(os, name, replacement)

    @contextmanager
    def _event(self, what: str, fd: int = -1, **fields: Any) -> Iterator[None]:
        """Kept if it is about a file with a name, or a folder of the run."""
        inode = fields.pop("inode", None) or os.fstat(fd).st_ino
        if inode not in self._known and inode not in self.recording.folders:
            yield
            return
        event = Event(what, self.tick(), inode=inode, **fields)
        self.note(event)
        yield
        event.ended = self.tick()
