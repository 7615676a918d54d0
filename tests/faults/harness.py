"""What the tests of faults share: a small run that can be cut short, and the oracle that judges what is left of it.

history   the run uninterrupted: a hash of the whole state (masters, moments, step) after each step, and its losses
recover   the store opened again, as the user's next command would. Its state must be the history's at its step, no step
          that was acknowledged may be missing, and, if asked, the rest of the run must be the history's too
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lohan import Engine
from lohan.host.pool import HostPool
from lohan.run.memory import Workspace
from lohan.ssd.file_store import FileStore
from tests.parity.harness import OPTIMIZER, TILE, limit_of, steps, tiny_model
from tests.parity.test_placements import make_plan

NUM_STEPS, FIRST_STEP = 10, 3
"""of a whole run; and where the ones begin that a fault meets in the middle"""
STRIPE_BYTES = 128 * 1024
"""small, so that both drives of a tiny store have a part of every unit"""
SCALE = float(os.environ.get("FAULTS", "1"))
"""10 is all that a release is held to, 1 a tenth of it"""
TIERS = {"architecture": "llama", "weights": "mixed", "state": "mixed", "boundaries": "ssd", "gradient": "ssd"}
SLOTS = {"prefetch": 1, "device_prefetch": 1, "spare_slots": 1, "chunk_elements": 12288}
ROOT = Path(__file__).parents[2]


def scaled(full: int) -> int:
    """How many of `full` injections this call of the tests makes."""
    return max(1, round(full * SCALE / 10))


def seeded(name: str) -> random.Random:
    """The same choices in every call, so that what failed once fails again; others with another FAULTS_SEED."""
    return random.Random(f"{name} {os.environ.get('FAULTS_SEED', '0')}")


def drives(folder: Path) -> list[Path]:
    """The two drives of a run."""
    return [folder / "one", folder / "two"]


@contextmanager
def on_a_drive() -> Iterator[Path]:
    """An empty folder on the drive that holds the checkout: /tmp may be tmpfs, which is no drive."""
    scratch = ROOT / ".bench"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        yield Path(folder)


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class Kind:
    """How a run keeps its state; all kinds have the same bits."""

    update: str
    """when units are updated, in the words of the parity tests; some steps are clipped"""
    store: str = "double"

    def __str__(self) -> str:
        return self.update if self.store == "double" else self.store


KINDS = [Kind("mixed"), Kind("speculate"), Kind("defer"), Kind("defer", "log")]


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Stripes that fit a tiny store; and no rehearsal, which is most of a first step and here finds nothing out."""
    patch.setattr("lohan.run.preparing.rehearse", lambda *_, **__: Workspace(0, "not rehearsed"))
    create: Any = FileStore.create
    patch.setitem(create.__func__.__kwdefaults__, "stripe_bytes", STRIPE_BYTES)
    patch.setattr("lohan.ssd.durable.STRIPE_BYTES", STRIPE_BYTES)


def open_run(folders: Sequence[Path], kind: Kind, **options: Any) -> Engine:
    """The engine on these folders, new or resumed."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "host_memory": "1GiB",
        "placement": make_plan({**TIERS, **SLOTS, "update": kind.update}),
        "optimizer": OPTIMIZER,
        "max_grad_norm": limit_of("llama"),
        "loss_tile": TILE,
        "seed": 3,
        "resume": True,
        "ssd": folders,
        "store": kind.store,
    }
    return Engine(tiny_model("llama"), **{**settings, **options})


def state_of(engine: Engine) -> str:
    """A hash of everything that the run goes on from: step, masters and moments, as the SSD has them."""
    engine.drain()
    digest = hashlib.blake2b(f"step {engine.num_steps}".encode(), digest_size=16)
    storage: Any = engine._storage
    for index, unit in enumerate(engine.shape.units):
        place = storage.place(storage.places.now[index])
        region = _read(place, engine.sizes.region_of(unit))
        start = 0
        for itemsize in (engine.sizes.weight, *engine.sizes.state_planes):
            for tensor in unit.tensors:
                if tensor.trainable:
                    digest.update(region[start + tensor.offset * itemsize : start + tensor.end * itemsize])
            start += unit.trainable_elements * itemsize
    return digest.hexdigest()


def _read(place: Any, nbytes: int) -> bytes:
    pool = HostPool(nbytes)
    buffer = pool.allocate(nbytes, "region")
    place.store.submit_read([(place.address, buffer)]).wait()
    content: bytes = buffer.numpy().tobytes()
    pool.close()
    return content


# ---------------------------------------------------------------- the oracle


@dataclass(frozen=True)
class History:
    """An uninterrupted run."""

    states: list[str]
    """after 0, 1, ... steps"""
    losses: list[float]


@cache
def history() -> History:
    """That of all kinds. Called first where `make_small` holds."""
    with on_a_drive() as folder, open_run([folder / "drive"], KINDS[0]) as engine:
        states, losses = [state_of(engine)], []
        for one in steps()[:NUM_STEPS]:
            losses.append(engine.step(one).loss)
            states.append(state_of(engine))
    return History(states, losses)


def recover(folders: Sequence[Path], kind: Kind, acknowledged: int, *, go_on: bool = False) -> int:
    """The step that a crash came back to, with exactly its state; `go_on` to the end of the run, with exactly its losses."""
    expected = history()
    with open_run(folders, kind) as engine:
        step = engine.num_steps
        assert step >= acknowledged, f"step {acknowledged} was acknowledged, and {step} is what is left"
        assert state_of(engine) == expected.states[step], f"step {step} has other bits"
        if go_on:
            losses = [engine.step(one).loss for one in steps()[step:NUM_STEPS]]
            assert losses == expected.losses[step:]
            assert state_of(engine) == expected.states[NUM_STEPS]
    return step
