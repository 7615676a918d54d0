"""With the limits that everybody has: what never completes is an error within 30 s, and closing takes no time on top."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lohan import Engine
from lohan.device.emulated import EmulatedDevice
from lohan.errors import StallError
from lohan.ssd.memory_store import MemoryStore
from tests.parity.harness import open_engine, steps, tiny_model

pytestmark = pytest.mark.faults

PATIENCE_S = 30.0
DEVICE_BYTES = 16 * 2**20


def step_until_it_stalls(engine: Engine) -> None:
    """The error counts from the step that meets it; closing is included."""
    began_s = time.monotonic()
    with pytest.raises(StallError), engine:
        while True:
            began_s = time.monotonic()
            engine.step(steps()[0])
    assert time.monotonic() - began_s < PATIENCE_S


def test_a_copy_that_never_ends() -> None:
    step_until_it_stalls(open_engine(tiny_model("llama"), device=EmulatedDevice(DEVICE_BYTES, stuck_copy=100)))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_read_that_never_completes(device: str) -> None:
    hung, released = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def read_piece(self, *args: Any) -> None:
            if hung.is_set():
                released.wait()
            super().read_piece(*args)

    opened = EmulatedDevice(DEVICE_BYTES) if device == "emulated" else device
    engine = open_engine(
        tiny_model("llama"),
        device=opened,
        host_memory="900KiB",
        make_store=lambda nbytes, name, gone: Hanging(nbytes, threads=1),
    )
    engine.step(steps()[0])
    hung.set()
    try:
        step_until_it_stalls(engine)
    finally:
        released.set()
