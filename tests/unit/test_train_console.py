"""What people see, what interrupts do, and what a log keeps: without a model."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lohan.train.console import Console
from lohan.train.interrupts import Interrupts
from lohan.train.log import RunLog, read_log


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for a thread; the limit is for a test that fails."""
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


# -------------------------------------------------------------------- console


def test_off_a_terminal_lines_are_plain_and_somebody_is_alive() -> None:
    stream = io.StringIO()
    with Console(stream, heartbeat_s=0.01) as console:
        console.progress("tokenise", 0, 8)
        console.progress("tokenise", 2, 8)
        eventually(lambda: "tokenise: 25%, 0 s so far\n" in stream.getvalue())
        console.work("step 7/9")
        eventually(lambda: "step 7/9: 0 s so far\n" in stream.getvalue())
        console.idle()
        console.line("the end")
        ended = stream.getvalue()
        time.sleep(0.05)
        assert stream.getvalue() == ended
    assert stream.getvalue().startswith("tokenise ...\n")
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_step_says_how_far_it_is_and_goes_on_after_its_parts() -> None:
    stream = io.StringIO()
    with Console(stream, heartbeat_s=0.01) as console:
        console.work("step 7/9", lambda: 0.25)
        console.progress("rehearse", 0, None)
        eventually(lambda: "rehearse: 0 s so far\n" in stream.getvalue())
        console.progress("allocate", 0, None)
        console.progress("allocate", 1, 1)
        eventually(lambda: "step 7/9: 25%, 0 s so far\n" in stream.getvalue().rpartition("allocate ...")[2])
        console.progress("step 7/9", 1, 4)
    assert [line for line in stream.getvalue().splitlines() if "so far" not in line] == ["rehearse ...", "allocate ..."]


def test_on_a_terminal_the_last_line_is_alive() -> None:
    stream = io.StringIO()
    with Console(stream, is_terminal=True) as console:
        console.phase("tokenise")
        eventually(lambda: stream.getvalue().count("tokenise: 0 s so far") > 1)
        console.line("a line that stays")
    shown = [line.rpartition("\x1b[2K")[2] for line in stream.getvalue().split("\n")]
    assert shown[0] == "a line that stays" and re.fullmatch(r"tokenise: \d+\.\d s", shown[1]) and shown[2] == ""


# -------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_request_in_patience_and_an_interrupt_outside(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts("finishing") as interrupts:
        with interrupts.patience():
            assert not interrupts.requested
            os.kill(os.getpid(), number)
            eventually(lambda: interrupts.requested)
    assert signal.getsignal(number) is before
    with pytest.raises(KeyboardInterrupt), Interrupts("finishing") as interrupts:
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert not interrupts.requested


def test_the_second_signal_leaves_from_the_middle_of_an_operation() -> None:
    """In a call that Python cannot interrupt: the handlers of Python do not run."""
    code = """
import ctypes
from lohan.train.interrupts import Interrupts
with Interrupts("finishing this step") as interrupts, interrupts.patience():
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert [process.stderr.readline(), process.stderr.readline()] == [b"\n", b"lohan: finishing this step\n"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        assert b"left at once" in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_usr1_pauses_and_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts("finishing") as interrupts, interrupts.patience():
        interrupts.wait_while_paused()  # which nobody asked for
        os.kill(os.getpid(), signal.SIGUSR1)
        eventually(lambda: interrupts.paused)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        interrupts.wait_while_paused()
        assert not interrupts.paused and not interrupts.requested
    told = capfd.readouterr().err
    assert "lohan: pausing after this step" in told and "lohan: going on" in told


def test_a_pause_ends_with_an_interrupt() -> None:
    with Interrupts("finishing") as interrupts, interrupts.patience():
        os.kill(os.getpid(), signal.SIGUSR1)
        eventually(lambda: interrupts.paused)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        interrupts.wait_while_paused()
        assert interrupts.requested


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts("finishing") as interrupts, interrupts.patience():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert not interrupts.requested and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_than_the_main_one_takes_no_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with Interrupts("finishing"):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


# -------------------------------------------------------------------- log


def test_a_log_that_continues_has_no_step_twice_and_no_half_line(tmp_path: Path) -> None:
    with RunLog(tmp_path, 0) as log:
        for step in range(1, 6):
            log.write({"step": step, "loss": float(step)})
        log.write({"step": 5, "eval_loss": 1.0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with RunLog(tmp_path, 4) as log:
        log.write({"step": 5, "loss": 0.5})
    assert [record["loss"] for record in read_log(tmp_path / "log.jsonl")] == [1.0, 2.0, 3.0, 4.0, 0.5]


def test_what_is_not_finite_is_null_and_batches_passed_over_are_counted(tmp_path: Path) -> None:
    with RunLog(tmp_path, 0) as log:
        log.write({"step": 1, "loss": 2.0})
        log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "skipped": True})
    text = (tmp_path / "log.jsonl").read_text().splitlines()[1]
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None, "skipped": True}
    with RunLog(tmp_path, 1) as log:
        assert log.num_skipped == 1


def test_a_run_that_begins_puts_the_log_of_another_aside(tmp_path: Path) -> None:
    with RunLog(tmp_path, 0) as log:
        log.write({"step": 1})
    with RunLog(tmp_path, 0) as log:
        assert log.records == [] and read_log(tmp_path / "log.before.jsonl") == [{"step": 1}]
    assert read_log(tmp_path / "log.jsonl") == []
