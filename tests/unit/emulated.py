"""What tests of the emulated device share."""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor

from lohan.device.emulated import EmulatedDevice
from lohan.schedule.ops import Lane

HOLD_S = 10.0


def drain(device: EmulatedDevice) -> None:
    event = device.event(Lane.COMPUTE)
    device.record(Lane.COMPUTE, event)
    device.synchronize(event)


def hold(device: EmulatedDevice, lane: Lane) -> threading.Event:
    """Keep the lane's stream from going on until the result is set, or the test has failed long ago."""
    gate = threading.Event()
    device._streams[lane].put(partial(gate.wait, HOLD_S))
    return gate


def host_memory(device: EmulatedDevice, fill: int) -> Tensor:
    host = torch.full((4096,), fill, dtype=torch.uint8)
    device.register(host)
    return host
