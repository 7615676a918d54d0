"""What a step was like: its record for log.jsonl, and its line for people."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

from lohan.host import memory as host_memory
from lohan.report import StepReport
from lohan.train.log import Record
from lohan.train.run_wear import written_words

NUM_RECENT = 20
"""steps whose pace says when the run ends"""
SHORT_LANES = {"ssd_read": "read", "ssd_write": "write", "upload": "up", "download": "down", "optimizer": "update"}


class Meter:
    """Watches steps go by. Opened before the engine, so that what Python and its libraries hold is known."""

    def __init__(self, host_budget: int, device_budget: int | None) -> None:
        self._budgets = (host_budget, device_budget)
        self.baseline_bytes = host_memory.resident_bytes()
        self.written_bytes = self.read_bytes = self.num_tokens = 0
        self._began_s = self._step_began_s = time.monotonic()
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._began_s

    def begin_step(self) -> None:
        self._step_began_s = time.monotonic()

    def record(self, report: StepReport, *, num_tokens: int, epoch: float) -> Record:
        """What log.jsonl says of a step that has just ended. `num_tokens` went through the model, padding not counted."""
        took_s = time.monotonic() - self._step_began_s
        self._recent_s.append(took_s)
        self.written_bytes += report.ssd_write_bytes
        self.read_bytes += report.ssd_read_bytes
        self.num_tokens += num_tokens
        record = {
            "step": report.step,
            "committed_step": report.committed_step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "epoch": round(epoch, 4),
            "tokens": num_tokens,
            "tokens_per_s": num_tokens / report.step_s,
            "step_s": report.step_s,
            "peak_host_bytes": report.peak_host_bytes,
            "peak_device_bytes": report.peak_device_bytes,
            "process_bytes": host_memory.peak_resident_bytes(),
            "ssd_read_bytes": report.ssd_read_bytes,
            "ssd_write_bytes": report.ssd_write_bytes,
            "speed_of_light": report.speed_of_light,
            "lanes": {
                lane.value: {"busy_s": use.busy_s, "waiting_s": use.waiting_s, "bytes": use.bytes}
                for lane, use in report.lanes.items()
            },
        }
        return record | {"skipped": True} if report.skipped else record

    def line(self, record: Record, num_steps: int) -> str:
        """What is printed of a step."""
        host_budget, device_budget = self._budgets
        parts = [
            f"step {record['step']}/{num_steps}" + (" SKIPPED" if record.get("skipped") else ""),
            f"loss {record['loss']:.4f}",
            f"grad {record['grad_norm']:.3f}",
            f"lr {record['learning_rate']:.2e}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            f"{record['step_s']:.2f} s",
        ]
        if record["speed_of_light"] is not None:
            parts.append(f"{record['speed_of_light']:.0%} of light")
        parts.append(" ".join(self._lanes(record)))
        process = f"process {size(record['process_bytes'])}, {size(self.baseline_bytes)} of it Python"
        parts.append(f"RAM {size(record['peak_host_bytes'])} of {size(host_budget)} ({process})")
        if record["peak_device_bytes"]:
            of = f" of {size(device_budget)}" if device_budget else ""
            parts.append(f"device {size(record['peak_device_bytes'])}{of}")
        parts.append(written_words(record))
        parts.append(f"ETA {clock((num_steps - record['step']) * median(self._recent_s))}")
        return " | ".join(parts)

    def _lanes(self, record: Record) -> list[str]:
        lanes: dict[str, dict[str, Any]] = record["lanes"]
        step_s = record["step_s"]
        return [f"{SHORT_LANES.get(lane, lane)} {min(1.0, use['busy_s'] / step_s):.0%}" for lane, use in lanes.items()]


def size(nbytes: int) -> str:
    """1.5 GiB, or 300 MiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
