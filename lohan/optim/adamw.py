"""AdamW, as torch.optim.AdamW computes it (one tensor at a time, no amsgrad)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lohan import native
from lohan.native import AdamWScalars, Sums
from lohan.optim import reference
from lohan.optim.base import Kernel, Part, Plane, check_kernel, check_range


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay."""

    lr: float = 2e-5
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay of the running means of the gradient and of its square"""
    eps: float = 1e-8
    """added to the root of the mean square, after its bias correction"""
    weight_decay: float = 0.01
    """of matrices; norms and biases do not decay"""
    kernel: Kernel = "native"
    """both kernels give the same bits; `reference` is slow"""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0.0)
        check_range("betas[0]", self.betas[0], 0.0, 1.0)
        check_range("betas[1]", self.betas[1], 0.0, 1.0)
        check_range("eps", self.eps, 0.0)
        check_range("weight_decay", self.weight_decay, 0.0)
        check_kernel(self.kernel)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return Plane("mean", 4), Plane("square", 4)

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
        ranges = [(part.start, part.stop, self._scalars(step, lr, part.weight_decay, clip)) for part in parts]
        kernels = native if self.kernel == "native" else reference
        kernels.update("adamw", weight, rest, grad, state, ranges, sums)

    def _scalars(self, step: int, lr: float, weight_decay: float, clip: float) -> AdamWScalars:
        """Computed in double: 1 - beta2 in fp32 would put the square off by 7e-6."""
        beta1, beta2 = self.betas
        return AdamWScalars(
            clip=clip,
            keep=1 - lr * weight_decay,
            gradient_weight=1 - beta1,
            beta2=beta2,
            square_weight=1 - beta2,
            root_bias_correction2=(1 - beta2**step) ** 0.5,
            eps=self.eps,
            step_size=lr / (1 - beta1**step),
        )
