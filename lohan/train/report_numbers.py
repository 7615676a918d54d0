"""The headline of a report: what a run did and what it cost, in a few numbers for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Any

from lohan.config import parse_bytes
from lohan.errors import OptionError
from lohan.train.report_log import History
from lohan.train.run_wear import percent

Settings = Mapping[str, Any]
"""what config.yaml says; empty if there is none"""


@dataclass(frozen=True, slots=True)
class Tile:
    label: str
    value: str
    detail: str = ""
    share: float | None = None
    """of a budget that was used"""


def tiles(history: History, settings: Settings) -> list[Tile]:
    """All that is known, in reading order."""
    made = [
        _model(settings),
        _steps(history, settings),
        _loss(history),
        _evaluation(history),
        _tokens(history),
        _throughput(history),
        _speed_of_light(history),
        _moved("Written to SSD", history, "total_write_bytes"),
        _life(history),
        _moved("Read from SSD", history, "total_read_bytes"),
        _memory("Host memory", history, "peak_host_bytes", budget(settings, "host_memory")),
        _memory("Device memory", history, "peak_device_bytes", budget(settings, "device_memory")),
    ]
    return [tile for tile in made if tile is not None]


def budget(settings: Settings, name: str) -> int | None:
    """A setting that is a size, in bytes."""
    try:
        return None if settings.get(name) is None else parse_bytes(name, settings[name])
    except OptionError:
        return None


def clip_norm(settings: Settings) -> float | None:
    """The norm to which gradients were clipped, if they were."""
    value = settings.get("max_grad_norm")
    return float(value) if isinstance(value, int | float) and value > 0 else None


# -------------------------------------------------------------------- tiles


def _model(settings: Settings) -> Tile | None:
    name = settings.get("model_name_or_path")
    if not name:
        return None
    return Tile("Model", PurePath(str(name)).name, _listed(settings.get(key) for key in ("optim", "dtype", "device")))


def _steps(history: History, settings: Settings) -> Tile:
    columns, planned, limit = history.columns, settings.get("max_steps"), clip_norm(settings)
    committed, epoch = columns["committed_step"][-1], columns["epoch"][-1]
    num_clipped = sum(norm > limit for norm in columns["grad_norm"]) if limit else 0
    details = [
        f"{committed:,.0f} committed" if math.isfinite(committed) else "",
        f"{epoch:.2f} epochs" if math.isfinite(epoch) else "",
        f"{num_clipped:,} clipped" if num_clipped else "",
        f"{len(history.skipped_at):,} skipped" if history.skipped_at else "",
    ]
    step = columns["step"][-1]
    of = f" of {planned:,}" if isinstance(planned, int) and planned > step else ""
    return Tile("Steps", f"{step:,.0f}{of}", _listed(details))


def _loss(history: History) -> Tile | None:
    losses = history.finite("loss")
    if not losses:
        return None
    row = history.columns["loss"].index(min(losses))
    return Tile("Loss", _from_to(losses), f"lowest {min(losses):.4f} at step {history.columns['step'][row]:,.0f}")


def _evaluation(history: History) -> Tile | None:
    losses = [(one.values["eval_loss"], one.step) for one in history.evaluations if "eval_loss" in one.values]
    losses = [(loss, step) for loss, step in losses if math.isfinite(loss)]
    if not losses:
        return None
    lowest, step = min(losses)
    return Tile("Evaluation loss", _from_to([loss for loss, _ in losses]), f"lowest {lowest:.4f} after step {step:,}")


def _tokens(history: History) -> Tile | None:
    tokens, total_s = history.columns["total_tokens"][-1], history.columns["total_s"][-1]
    return Tile("Tokens", count(tokens), f"in {duration(total_s)} of steps") if tokens else None


def _throughput(history: History) -> Tile | None:
    rates, times = history.finite("tokens_per_s"), history.finite("step_s")
    if not rates:
        return None
    return Tile(
        "Throughput", f"{median(rates):,.0f} tokens/s", f"median; {duration(median(times))} a step" if times else "median"
    )


def _speed_of_light(history: History) -> Tile | None:
    shares = history.finite("speed_of_light")
    if not shares:
        return None
    return Tile("Speed of light", f"{median(shares):.0%}", f"median; best step {max(shares):.0%}", median(shares))


def _moved(label: str, history: History, column: str) -> Tile | None:
    nbytes, tokens = history.columns[column][-1], history.columns["total_tokens"][-1]
    if not nbytes:
        return None
    return Tile(label, decimal_bytes(nbytes), f"{decimal_bytes(nbytes / tokens * 1e6)} per million tokens" if tokens else "")


def _life(history: History) -> Tile | None:
    """All that the run has ever written, import, checkpoints and lost steps included, and what that is of a drive's life."""
    totals, shares = history.finite("ssd_total_write_bytes"), history.finite("ssd_life_share")
    if not totals:
        return None
    hours = history.columns["total_s"][-1] / 3600
    detail = f"{decimal_bytes(history.columns['total_write_bytes'][-1] / hours)} an hour of steps" if hours else ""
    if not shares:
        return Tile("SSD wear", decimal_bytes(max(totals)), _listed((detail, "ssd_endurance_tbw says of how much")))
    return Tile("SSD wear", percent(max(shares)), _listed((f"of the drives' rated life, {decimal_bytes(max(totals))}", detail)))


def _memory(label: str, history: History, column: str, limit: int | None) -> Tile | None:
    peak = max(history.finite(column), default=0.0)
    if not peak:
        return None
    if limit is None:
        return Tile(label, binary_bytes(peak), "at most; its budget is not in config.yaml")
    return Tile(label, binary_bytes(peak), f"at most, {peak / limit:.0%} of {binary_bytes(limit)}", peak / limit)


# -------------------------------------------------------------------- words


def _listed(parts: Iterable[object]) -> str:
    return ", ".join(str(part) for part in parts if part)


def _from_to(values: Sequence[float]) -> str:
    return f"{values[0]:.4f}" if len(values) == 1 else f"{values[0]:.4f} → {values[-1]:.4f}"


def binary_bytes(nbytes: float) -> str:
    """Memory: 47.1 MiB."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def decimal_bytes(nbytes: float) -> str:
    """What drives move: 4.31 GB."""
    return _scaled(nbytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def count(number: float) -> str:
    """18,288, or 1.23 million."""
    return f"{number:,.0f}" if number < 1e6 else _scaled(number, 1000, ("", "thousand", "million", "billion", "trillion"))


def duration(seconds: float) -> str:
    """26.2 ms, 1.94 s, 4 min 12 s, 3 h 5 min, 2 d 7 h."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    """With three digits, in the largest unit of which there is one."""
    power = 0
    while number >= base and power + 1 < len(units):
        number, power = number / base, power + 1
    digits = max(0, 2 - int(math.log10(number))) if number >= 1 else 2
    return f"{number:,.{digits if power else 0}f} {units[power]}"
