"""An accelerator in software, to develop and test on. Start reading at `device`."""

from __future__ import annotations

from lohan.device.emulated.device import EmulatedDevice

__all__ = ["EmulatedDevice"]
