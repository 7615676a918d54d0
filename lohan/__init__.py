"""lohan fine-tunes models whose training state is many times larger than the GPU's memory, and larger than RAM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lohan.host.heap import use_huge_pages

if TYPE_CHECKING:
    from lohan.engine import Engine
    from lohan.optim.adamw import AdamW
    from lohan.optim.sgd import SGD
    from lohan.plan.plan import Plan
    from lohan.train.config import TrainingConfig
    from lohan.train.trainer import Trainer

use_huge_pages()

__version__ = "0.1.0"
_WHERE = {
    "Engine": "lohan.engine",
    "AdamW": "lohan.optim.adamw",
    "SGD": "lohan.optim.sgd",
    "Plan": "lohan.plan.plan",
    "Trainer": "lohan.train.trainer",
    "TrainingConfig": "lohan.train.config",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import lohan` takes no torch, so that commands answer at once."""
    if name not in _WHERE:
        raise AttributeError(f"module 'lohan' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


__all__ = ["AdamW", "Engine", "Plan", "SGD", "Trainer", "TrainingConfig"]
