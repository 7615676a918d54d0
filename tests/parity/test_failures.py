"""Whatever fails, the caller gets the error that it was, nothing hangs, and closing ends every thread.

A hang would end the test process after HANG_S, with the stacks of all threads in HANG_REPORT.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan import AdamW, Engine
from lohan.device.emulated import EmulatedDevice
from lohan.device.protocol import Device
from lohan.errors import BudgetError, ClosedError, ModelError, StallError, StoreError, WorkerError
from lohan.ssd.file_store import FileStore
from lohan.ssd.memory_store import MemoryStore
from tests.parity.harness import open_engine, steps, tiny_model
from tests.parity.tight import MODEL, PLAN

HANG_S = 120
HANG_REPORT = Path(tempfile.gettempdir(), "lohan-hang.txt")
STALL_S = 0.3
DEVICE_BYTES = 16 * 2**20


@pytest.fixture(autouse=True)
def no_hang_and_no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    with HANG_REPORT.open("w") as report:
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=report)
        yield
        faulthandler.cancel_dump_traceback_later()
    HANG_REPORT.unlink(missing_ok=True)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in names if name.startswith(("lohan", "ssd-"))]


@pytest.fixture(params=["cpu", "emulated"])
def device(request: pytest.FixtureRequest) -> str | Device:
    return "cpu" if request.param == "cpu" else EmulatedDevice(DEVICE_BYTES)


def opened(device: str | Device, **options: Any) -> Engine:
    return open_engine(tiny_model(MODEL), device=device, placement=PLAN, **options)


def train(engine: Engine, num: int = 3) -> None:
    for batches in steps()[:num]:
        engine.step(batches)


def fail_after(num: int, call: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`call`, but from its `num`-th time on it raises `error`."""
    left = iter(range(num))

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise error
        return call(*args, **kwargs)

    return maybe


def assert_stopped(engine: Engine, text: str) -> None:
    """It says why it cannot go on, whatever is asked of it, and closes without another word."""
    for ask in (
        partial(train, engine),
        partial(engine.evaluate, steps()[0]),
        partial(engine.read_parameter, "model.norm.weight"),
    ):
        with pytest.raises(ClosedError, match=re.escape(text)):
            ask()
    engine.close()


@pytest.mark.parametrize(("call", "code"), [("preadv", errno.EIO), ("pwritev", errno.ENOSPC)])
@pytest.mark.parametrize("num", [9, 40])
def test_a_drive_that_fails(
    device: Device, call: str, code: int, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(device, make_store=lambda nbytes, name, gone: FileStore.create([tmp_path], nbytes, file_name=name))
    monkeypatch.setattr(os, call, fail_after(num, getattr(os, call), OSError(code, os.strerror(code))))
    with pytest.raises(StoreError, match=rf"{tmp_path}.* \(errno {code}\)"):
        train(engine)
    assert_stopped(engine, os.strerror(code))


def test_an_optimizer_that_fails(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamW, "update", fail_after(2, AdamW.update, ZeroDivisionError("the kernel broke")))
    engine = opened(device)
    with pytest.raises(WorkerError, match="update unit .* ZeroDivisionError: the kernel broke") as caught:
        train(engine)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert_stopped(engine, "the kernel broke")


def test_a_copy_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(DEVICE_BYTES)
    monkeypatch.setattr(device, "copy", fail_after(20, device.copy, RuntimeError("the link is down")))
    engine = opened(device)
    with pytest.raises(WorkerError, match="RuntimeError: the link is down"):
        train(engine)
    assert_stopped(engine, "the link is down")


@pytest.mark.parametrize("number", [0, 5, 30])
def test_a_copy_that_never_ends(number: int) -> None:
    engine = opened(EmulatedDevice(DEVICE_BYTES, stall_s=STALL_S, stuck_copy=number))
    with pytest.raises(StallError, match=f"copy {number} on .* made no progress"):
        train(engine, 6)
    assert_stopped(engine, "made no progress")


class Tap:
    """Lets some transfers through, and holds the others up until it is opened."""

    def __init__(self, num: int) -> None:
        self.opened = threading.Event()
        self._left = iter(range(num))

    def hold(self, transfer: Callable[..., None]) -> Callable[..., None]:
        def held(*args: Any) -> None:
            if next(self._left, None) is None:
                self.opened.wait()
            transfer(*args)

        return held


@pytest.mark.parametrize("transfer", ["read_piece", "write_piece"])
def test_a_request_that_never_completes(device: Device, transfer: str) -> None:
    """Closing does not wait for it either; its thread ends with it."""
    tap = Tap(25)

    def make_store(nbytes: int, name: str, gone: bool) -> MemoryStore:
        store = MemoryStore(nbytes, threads=1, stall_s=STALL_S)
        setattr(store, transfer, tap.hold(getattr(store, transfer)))
        return store

    engine = opened(device, make_store=make_store)
    with pytest.raises(StallError, match="The drive does not answer"):
        train(engine)
    with pytest.raises(ClosedError, match="does not answer"):
        train(engine)
    with pytest.raises(StallError, match="did not finish within 0 s of closing"):
        engine.close()
    tap.opened.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("ssd-")]:
        thread.join()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("the model broke")], ids=repr)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_model_that_fails(device: Device, where: str, error: BaseException) -> None:
    engine = opened(device)
    train(engine, 1)
    block = engine.model.get_submodule("model.layers.1.mlp")

    def broken(*_: Any) -> None:
        raise error

    hook = block.register_forward_hook(broken) if where == "forward" else block.register_full_backward_pre_hook(broken)
    with pytest.raises(type(error)):
        train(engine)
    hook.remove()
    assert_stopped(engine, repr(error))


def test_a_loss_that_fails(device: Device) -> None:
    engine = opened(device)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        model(**batch)
        raise ValueError("no loss today")

    with pytest.raises(ValueError, match="no loss today"):
        engine.step(steps()[0], loss_fn=loss_fn)
    engine.close()


def test_an_interrupt_while_the_host_waits_for_the_norm(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pending has been applied by then, and the books do not say so yet: it must not be applied again."""
    engine = opened(device)
    train(engine, 1)
    training: Any = engine._ready().training
    monkeypatch.setattr(training, "decide", fail_after(0, training.decide, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(engine)
    assert_stopped(engine, "KeyboardInterrupt")


def test_generation_stops_the_engine_only_if_it_fails_within_a_pass(device: Device) -> None:
    engine, prompt = opened(device), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="no_such_option"):
        engine.generate(prompt, no_such_option=1)
    assert engine.generate(prompt, max_new_tokens=2, min_new_tokens=2, do_sample=False).shape == (1, 5)

    def broken(*_: Any) -> None:
        raise ValueError("the model broke")

    hook = engine.model.get_submodule("model.layers.1.mlp").register_forward_hook(broken)
    with pytest.raises(ValueError, match="the model broke"):
        engine.generate(prompt, max_new_tokens=2)
    hook.remove()
    assert_stopped(engine, "the model broke")


def test_an_error_after_the_last_step_is_raised_by_closing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(device)
    train(engine, 1)
    monkeypatch.setattr(AdamW, "update", fail_after(0, AdamW.update, ZeroDivisionError("the kernel broke")))
    with pytest.raises(WorkerError, match="the kernel broke"):
        engine.close()


def test_an_error_of_the_block_is_not_hidden_by_one_of_closing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mine") as caught, opened(device) as engine:
        train(engine, 1)
        monkeypatch.setattr(AdamW, "update", fail_after(0, AdamW.update, ZeroDivisionError("the kernel broke")))
        raise ValueError("mine")
    assert "the kernel broke" in caught.value.__notes__[0]


def test_an_engine_that_cannot_be_opened_leaves_nothing_behind(device: Device) -> None:
    with pytest.raises(BudgetError, match="host_memory=65536"):
        open_engine(tiny_model(MODEL), device=device, placement="memory", host_memory="64KiB")
    with pytest.raises(ModelError):
        open_engine(nn.Sequential(), device=device)
