"""How many bytes torch operations hold at once: a dispatch mode that counts storages from birth to death.

    with LiveBytes() as live:
        step()
    live.peak_bytes        # of storages that operations made within the block; what existed before does not count

On the cpu device it measures the workspace of a real step. On `meta` tensors it predicts that of a step that was never
run. A storage counts once however many views it has, and until the last of them, autograd's own included, is gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes of the storages that operations of this thread make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known: set[int] = set()
        self._dead: deque[tuple[int, int]] = deque()
        """storages that died, on whichever thread: a finalizer must not take a lock, and a deque needs none"""

    @property
    def live_bytes(self) -> int:
        self._bury()
        return self._live_bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, at the first operation, only to be told to stay away."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), before)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        """Count `storage` if this operation made it. An argument's storage is older; so is one that is counted already."""
        identity, nbytes = storage._cdata, storage.nbytes()
        self._bury()  # the address may be that of a dead storage, used again
        if identity in before or identity in self._known:
            return
        self._known.add(identity)
        self._live_bytes += nbytes
        weakref.finalize(storage, self._dead.append, (identity, nbytes))

    def _bury(self) -> None:
        while self._dead:
            identity, nbytes = self._dead.popleft()
            self._known.discard(identity)
            self._live_bytes -= nbytes
