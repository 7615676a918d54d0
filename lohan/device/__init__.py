"""The devices: what computes, and what it takes to feed it. `protocol` is all that the rest of lohan knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan.errors import OptionError

if TYPE_CHECKING:
    from lohan.device.protocol import Device

NAMES = ("auto", "cpu", "cuda", "cuda:<number>", "emulated")


def open_device(name: str, memory_bytes: int | None, **settings: Any) -> Device:
    """The device called `name`. `settings` go to its constructor (those of `emulated`: `EmulatedDevice`)."""
    if name == "auto":
        name = "cuda" if _has_cuda() else "cpu"
    if name == "cpu":
        return _open_cpu(memory_bytes, **settings)
    if name == "emulated":
        return _open_emulated(memory_bytes, **settings)
    if name == "cuda" or (name.startswith("cuda:") and name[5:].isdecimal()):
        from lohan.device.cuda import CudaDevice

        return CudaDevice(name, memory_bytes, **settings)
    raise OptionError("device", name, "there is no such device", f"Choose one of {', '.join(NAMES)}")


def _open_cpu(memory_bytes: int | None, **settings: Any) -> Device:
    from lohan.device.cpu import CpuDevice

    if memory_bytes is not None:
        remedy = "Leave device_memory out, and set host_memory to bound what lohan uses"
        raise OptionError("device_memory", memory_bytes, "the cpu device has no memory of its own", remedy)
    return CpuDevice(**settings)


def _open_emulated(memory_bytes: int | None, **settings: Any) -> Device:
    from lohan.device.emulated import EmulatedDevice

    if memory_bytes is None:
        raise OptionError("device_memory", None, "the emulated device has no size of its own", "Set it, for example to '2GiB'")
    return EmulatedDevice(memory_bytes, **settings)


def _has_cuda() -> bool:
    from lohan.device.cuda import is_available

    return is_available()
