"""What an optimizer is to the rest of lohan: the state it keeps, and one update in place.

The worker that updates a unit knows nothing of the rule: it reads the master and one array per plane, chunk by chunk, calls
`update` on them, and writes all of them back. So an optimizer declares its planes, and works on any ranges of elements.

A master weight comes in two forms. *Split*: the bf16 weight that the model computes with, and the 16 bits (int16) that are
missing to fp32; bf16 gradient. *Plain*: an fp32 weight that is its own master; fp32 gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from lohan.errors import OptionError
from lohan.native import Sums

Kernel = Literal["native", "reference"]
"""who does the arithmetic: the native kernels, or the readable torch code that has the same bits"""


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of optimizer state, an element for each trainable element, zero at the start."""

    name: str
    itemsize: int
    """bytes per element; the arrays are fp32"""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of the arrays of an update, which have the same weight decay."""

    start: int
    stop: int
    weight_decay: float


class Optimizer(Protocol):
    """An update rule with its settings. Implementations are frozen dataclasses, so that `asdict` identifies them."""

    @property
    def lr(self) -> float:
        """the peak learning rate, before the schedule's factor"""

    @property
    def weight_decay(self) -> float:
        """of the parameters that decay"""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The state arrays, in the order in which `update` wants them."""

    def update(
        self,
        weight: Tensor,
        rest: Tensor | None,
        grad: Tensor,
        state: Sequence[Tensor],
        *,
        step: int,
        lr: float,
        clip: float,
        parts: Sequence[Part],
        sums: Sums | None = None,
    ) -> None:
        """Update parts of 1-D contiguous CPU tensors in place, on the calling thread; what lies between parts stays.

        A bf16 `weight` comes with its int16 `rest`, an fp32 `weight` with None. `step` counts from 1, `lr` is that of this
        step. `clip` is the factor from `clip_coefficient`, 1.0 for none. `sums` wants the checksums of the whole arrays
        filled in, as they are found and as they are left: `reference.summing` does it, a native kernel on the way.
        """


def check_range(option: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a setting outside low <= value < high."""
    if not low <= value < high:
        bounds = f"at least {low:g}" if high == float("inf") else f"at least {low:g} and below {high:g}"
        raise OptionError(option, value, f"it has to be {bounds}", f"Set {option} to a value in that range")


def check_kernel(kernel: str) -> None:
    """Refuse a misspelt kernel."""
    if kernel not in ("native", "reference"):
        raise OptionError("kernel", kernel, "there is no such kernel", "Choose 'native' or 'reference'")
