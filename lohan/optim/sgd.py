"""SGD with momentum, as torch.optim.SGD computes it (no dampening, no Nesterov)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lohan import native
from lohan.native import SGDScalars, Sums
from lohan.optim import reference
from lohan.optim.base import Kernel, Part, Plane, check_kernel, check_range


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent with momentum and weight decay added to the gradient."""

    lr: float
    """peak learning rate"""
    momentum: float = 0.9
    """what remains of the velocity after a step; the first velocity is the first gradient"""
    weight_decay: float = 0.0
    """of matrices; norms and biases do not decay"""
    kernel: Kernel = "native"
    """both kernels give the same bits; `reference` is slow"""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0.0)
        check_range("momentum", self.momentum, 0.0, 1.0)
        check_range("weight_decay", self.weight_decay, 0.0)
        check_kernel(self.kernel)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("velocity", 4),)

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
        scalars = [SGDScalars(clip=clip, weight_decay=part.weight_decay, momentum=self.momentum, lr=lr) for part in parts]
        ranges = [(part.start, part.stop, one) for part, one in zip(parts, scalars, strict=True)]
        kernels = native if self.kernel == "native" else reference
        kernels.update("sgd", weight, rest, grad, state, ranges, sums)
