"""Refuses a process the n-th `mmap` of all its threads: the kernel's own answer, to Python and to every library in it.

    report    the process puts itself under a filter of the kernel (seccomp), which asks a listener about every mmap
    answer    whoever watches it answers, call after call, and counts: go on, or ENOMEM

strace would count the calls of each thread on their own, and refuse the n-th of every thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
import threading
import time

import pytest

from tests.faults.processes import Child

_PRCTL, _SECCOMP, _PIDFD_GETFD, _MMAP = 157, 317, 438, 9  # numbers of system calls on x86-64
_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _NEW_LISTENER = 38, 1, 8
_ASK, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND, _GO_ON = 0xC0502100, 0xC0182101, 1
_QUESTION_BYTES = 80
_libc = ctypes.CDLL(None, use_errno=True)

needs_seccomp = pytest.mark.skipif(
    platform.machine() != "x86_64" or os.geteuid() != 0, reason="numbers of system calls of x86-64, and another's files"
)


def next_number() -> int:
    """Of the file that this process opens next: what `report` will return, so that it can be told before."""
    number = os.open(os.devnull, os.O_RDONLY)
    os.close(number)
    return number


def report() -> None:
    """From now on every mmap of this process, and of all threads that it makes, waits for an answer."""
    load, equal, give = 0x20, 0x15, 0x06
    program = struct.pack("HBBI" * 4, load, 0, 0, 0, equal, 0, 1, _MMAP, give, 0, 0, _ASK, give, 0, 0, _ALLOW)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
    _call(_PRCTL, _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.create_string_buffer(header, len(header)))


class Answers:
    """Lets a process have all its mappings, but for one. A context manager, entered before the process reports."""

    def __init__(self, child: Child, listener: int, refused: int = -1) -> None:
        """`refused` counts from 0."""
        self.num_seen = 0
        self._pid, self._listener, self._refused = child.pid, listener, refused
        self._thread = threading.Thread(target=self._answer, name="answers", daemon=True)
        self._thread.start()

    @property
    def has_fired(self) -> bool:
        return 0 <= self._refused < self.num_seen

    def wait(self) -> None:
        """The process has ended."""
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _answer(self) -> None:
        file = self._take_listener()
        poll = select.poll()
        poll.register(file, select.POLLIN)
        try:
            while poll.poll()[0][1] & select.POLLIN:
                question = bytearray(_QUESTION_BYTES)
                try:
                    fcntl.ioctl(file, _RECEIVE, question)
                except FileNotFoundError:  # the thread that asked is gone
                    continue
                identity, refuses = struct.unpack_from("Q", question)[0], self.num_seen == self._refused
                self.num_seen += 1
                answer = struct.pack("QqiI", identity, 0, -errno.ENOMEM if refuses else 0, 0 if refuses else _GO_ON)
                try:
                    fcntl.ioctl(file, _SEND, answer)
                except FileNotFoundError:
                    continue
        finally:
            os.close(file)

    def _take_listener(self) -> int:
        """The process's file, once it is there."""
        process = os.pidfd_open(self._pid)
        try:
            while True:
                try:
                    return _call(_PIDFD_GETFD, process, self._listener, 0)
                except OSError as error:
                    if error.errno != errno.EBADF:
                        raise
                    time.sleep(0.001)
        finally:
            os.close(process)


def _call(*arguments: object) -> int:
    answer: int = _libc.syscall(*arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
