"""What runs leave behind, made up: logs, settings and traces as `lohan train` writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lohan.schedule.ops import Lane
from lohan.simulate.timeline import Span
from lohan.simulate.trace import write_trace

Record = dict[str, Any]
SETTINGS: Record = {
    "output_dir": "runs/first",
    "model_name_or_path": "models/tiny-llama",
    "learning_rate": 1e-3,
    "max_steps": 100,
    "max_grad_norm": 1.0,
    "host_memory": "48MiB",
    "device_memory": 40 * 2**20,
    "sample_prompts": ["Once upon a time"],
}


def step_record(step: int, **changed: Any) -> Record:
    """One step's line; no two steps have a number in common that can differ."""
    step_s = 2 + math.sin(step) / 3
    lanes = {lane.value: {"busy_s": step_s / (2 + index), "waiting_s": 0.1, "bytes": 10**7} for index, lane in enumerate(Lane)}
    record = {
        "step": step,
        "committed_step": step - 1,
        "loss": 2 + 6 * math.exp(-step / 20) + math.cos(step) / 10,
        "grad_norm": 1.2 + math.sin(3 * step),
        "learning_rate": 1e-3 / step,
        "epoch": step / 20,
        "tokens": 500 + step % 7,
        "tokens_per_s": (500 + step % 7) / step_s,
        "step_s": step_s,
        "peak_host_bytes": 45 * 2**20 + step,
        "peak_device_bytes": 18 * 2**20 + step,
        "process_bytes": 400 * 2**20 + step,
        "ssd_read_bytes": 110_000_000 + step,
        "ssd_write_bytes": 120_000_000 + step,
        "ssd_total_write_bytes": 130_000_000 * step,
        "ssd_life_share": step / 10**6,
        "speed_of_light": 1.7 / step_s,
        "lanes": lanes,
    }
    return record | changed


def write_log(folder: Path, records: Sequence[Record], end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records) + end)
    return folder


def write_run(folder: Path, num_steps: int = 36, **settings: Any) -> Path:
    """A whole run: every twelfth step an evaluation and a sample, and a trace."""
    records = []
    for step in range(1, num_steps + 1):
        records.append(step_record(step))
        if step % 12 == 0:
            records.append({"step": step, "epoch": step / 20, "eval_loss": 5 / step, "eval_targets": 1000})
            records.append({"step": step, "prompt": "Once upon a time", "sample": f"a drive read {step} units"})
    write_log(folder, records)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
    write_trace({"measured": spans(8, 1.1), "simulated": spans(8, 1.0)}, folder / "trace.json")
    return folder


def spans(num_units: int, unit_s: float) -> list[Span]:
    """A forward pass whose weights are read ahead, two at once."""
    made = []
    for unit in range(num_units):
        at_s = unit * unit_s
        made.append(Span(2 * unit, Lane.SSD_READ, f"read weights unit {unit}", at_s, at_s + 1.5 * unit_s, 0.0, 3_000_000))
        made.append(Span(2 * unit + 1, Lane.COMPUTE, f"forward unit {unit} site {unit}", at_s, at_s + 0.9 * unit_s, 0.0, 0))
    return made
