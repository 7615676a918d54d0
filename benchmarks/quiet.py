"""The CPU for a benchmark, while other programs run on the same machine.

    quiet()        the first thing in main(): from here on, everything else yields to this process and its children

Linux divides the CPU between sessions (*autogroups*) first and inside each of them second: a nice value alone counts for
nothing against another session. A benchmark therefore goes on in a session of its own, and both the session and the process
get the highest priority. That takes root; elsewhere nothing changes, and a line says so. Drives are shared all the same.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

HIGHEST = -20


def quiet() -> None:
    """Go on with the highest priority. The process that was started only waits, and passes signals on."""
    if os.getpriority(os.PRIO_PROCESS, 0) == HIGHEST:
        return  # the child of a quiet benchmark
    if os.geteuid() != 0:
        print("not root: other programs compete with this benchmark for the CPU", file=sys.stderr)
        return
    sys.stdout.flush()
    if pid := os.fork():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.setsid()
    os.setpriority(os.PRIO_PROCESS, 0, HIGHEST)
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        autogroup.write_text(str(HIGHEST))
