"""Every error that lohan raises on purpose.

An error for a user names the option, its value and the remedy; an I/O error carries path, offset, wanted and got bytes and
errno. Code that meets something it cannot explain lets the original exception pass.
"""

from __future__ import annotations


class LohanError(Exception):
    """The root of all errors that lohan raises on purpose."""


class OptionError(LohanError, ValueError):
    """A setting that cannot work: which option, what it was set to, why not, and what to do."""

    def __init__(self, option: str, value: object, reason: str, remedy: str) -> None:
        self.option, self.value, self.reason, self.remedy = option, value, reason, remedy
        super().__init__(f"{option}={value!r}: {reason}. {remedy}")


class BudgetError(OptionError):
    """A memory budget below what the plan needs; `needed_bytes` is the smallest budget that works."""

    def __init__(self, option: str, value: object, needed_bytes: int, reason: str) -> None:
        self.needed_bytes = needed_bytes
        mib = -(-needed_bytes // 2**20)
        super().__init__(option, value, reason, f"The smallest {option} that works here is {mib}MiB ({needed_bytes} bytes)")


class ModelError(LohanError):
    """A model or a weight file that lohan refuses, with the tensor or module and the reason."""


class StoreError(LohanError, OSError):
    """An I/O request that did not do what was asked."""

    def __init__(self, action: str, path: str, offset: int, wanted: int, got: int, errno: int | None, reason: str) -> None:
        self.action, self.path, self.offset, self.wanted, self.got, self.code = action, path, offset, wanted, got, errno
        super().__init__(f"{action} {path} at byte {offset}: wanted {wanted} bytes, got {got} (errno {errno}): {reason}")


class NativeError(LohanError):
    """The native library is missing, or one of its kernels was given buffers that it cannot work on."""


class ScheduleError(LohanError):
    """A schedule that the checker refuses, or a run that departs from its schedule."""


class RaceError(LohanError):
    """An access that no event orders after the one it conflicts with, or that finds something else than expected."""


class DeviceMemoryError(LohanError, MemoryError):
    """A device allocation beyond the device's budget."""


class StallError(LohanError, TimeoutError):
    """A worker that made no progress for too long."""


class WorkerError(LohanError):
    """An exception on one of lohan's threads, raised where the user can see it."""


class ThreadError(LohanError, RuntimeError):
    """A thread that the system did not let begin."""


class ClosedError(LohanError):
    """An engine that was used after it was closed, or after an error that it cannot continue from."""
