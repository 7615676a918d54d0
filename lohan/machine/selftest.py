"""A tiny model trained on every device, once in memory and once from an SSD: do both come to the same bits?

    model     a Llama of two layers with random weights, built from its configuration
    memory    STEPS steps with everything in RAM
    ssd       the same with everything on the drive: weights, state, gradients, activations
    verdict   losses, gradient norms and every weight equal, bit for bit; the emulated device gives the processor's

A GPU adds in another order than a processor, so between those only the losses are compared, within CLOSE. Its own kernels are
told to be deterministic.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from lohan.engine import Engine
from lohan.machine.findings import Finding, Level
from lohan.optim.adamw import AdamW
from lohan.plan.plan import Plan
from lohan.plan.policies import ssd_plan

AREA = "self-test"
STEPS = 4
CLOSE = 0.01
"""relative difference between losses of a GPU and of the processor: bf16 has 8 bits"""
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MAX_GRAD_NORM = 1.0
"""below the norms of these steps: clipping is part of the test"""
MEMORY = {"emulated": "64MiB"}
"""device_memory"""
ISSUES = "Open an issue with this whole report"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]
    step_s: float
    """of the last step"""

    @property
    def digest(self) -> str:
        """Of all weights: the same on two machines if their bits are."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode())
            digest.update(self.weights[name].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:12]

    def differences(self, other: Outcome) -> list[str]:
        """What has other bits."""
        found = [name for name in ("losses", "norms") if getattr(self, name) != getattr(other, name)]
        names = [name for name, weight in self.weights.items() if not torch.equal(weight, other.weights[name])]
        return found + ([f"{len(names)} of {len(self.weights)} weights, first {names[0]}"] if names else [])


Train = Callable[[str, Path, Path | None], Outcome]
"""device, model, folder on a drive (None: in memory)"""


def use_fixed_workspaces() -> None:
    """What cuBLAS needs to be deterministic. It looks once, so this comes before a GPU is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def selftest(devices: Sequence[str], scratch: Path, tell: Callable[[str], None]) -> Iterator[Finding]:
    """A finding for each device. `scratch`: an empty folder on a drive."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = make_model(scratch / "model")
    expected: Outcome | None = None
    for device in devices:
        drive = scratch / f"store-{device.replace(':', '-')}"
        try:
            tell(f"training on {device}, in memory")
            in_memory = train(device, model, None)
            tell(f"training on {device}, from {scratch.parent}")
            finding = judge(device, in_memory, train(device, model, drive), expected)
        except Exception as error:
            last = traceback.format_exc(limit=-4)
            finding = Finding(AREA, device, f"{type(error).__name__}", Level.PROBLEM, f"{error}\n{last}", ISSUES)
            yield finding
            continue
        expected = expected or in_memory
        yield finding


def make_model(folder: Path) -> Path:
    """A random Llama, the same on every machine."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def train(device: str, model: Path, drive: Path | None) -> Outcome:
    """STEPS steps of two micro-batches of unequal length."""
    options: dict[str, Any] = {"device": device, "device_memory": MEMORY.get(device), "host_memory": "256MiB"}
    with _deterministic(device.startswith("cuda")):
        if drive is None:
            return _run(model, options, "memory")
        with Engine(model, placement="memory", **options) as engine:
            plan = ssd_plan(engine.shape, clips=True)
        return _run(model, {**options, "ssd": [drive]}, plan)


def judge(device: str, in_memory: Outcome, from_ssd: Outcome, expected: Outcome | None) -> Finding:
    """One device's verdict; `expected`: what the first device came to."""
    losses = f"loss {in_memory.losses[0]:.4f} to {in_memory.losses[-1]:.4f}"
    value = f"same bits in memory and from the SSD, {losses}, weights {in_memory.digest}"
    if different := in_memory.differences(from_ssd):
        wrong = f"Trained from the SSD, these have other bits than in memory: {', '.join(different)}."
        return Finding(AREA, device, "different bits", Level.PROBLEM, wrong, ISSUES)
    if not in_memory.losses[-1] < in_memory.losses[0]:
        wrong = f"On {STEPS} steps of the same tokens the loss has to fall: {in_memory.losses}."
        return Finding(AREA, device, "does not learn", Level.PROBLEM, wrong, ISSUES)
    if expected is None or expected is in_memory:
        return Finding(AREA, device, value)
    if device.startswith("cuda"):
        pairs = zip(in_memory.losses, expected.losses, strict=True)
        furthest = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
        if furthest > CLOSE:
            wrong = f"Its losses are up to {furthest:.1%} away from the processor's: {in_memory.losses}, {expected.losses}."
            return Finding(AREA, device, "far from the processor", Level.PROBLEM, wrong, ISSUES)
        return Finding(AREA, device, f"{value}, losses within {furthest:.2%} of the processor's")
    if different := in_memory.differences(expected):
        wrong = f"It has the processor's arithmetic and these other bits: {', '.join(different)}."
        return Finding(AREA, device, "different bits", Level.PROBLEM, wrong, ISSUES)
    return Finding(AREA, device, value)


def _run(model: Path, options: dict[str, Any], placement: str | Plan) -> Outcome:
    with Engine(model, placement=placement, optimizer=AdamW(lr=1e-3), max_grad_norm=MAX_GRAD_NORM, **options) as engine:
        batches = [_batch(2, 48), _batch(1, 31)]
        losses, norms, step_s = [], [], 0.0
        for _ in range(STEPS):
            began_s = time.perf_counter()
            report = engine.step(batches)
            step_s = time.perf_counter() - began_s
            losses.append(report.loss)
            norms.append(report.grad_norm)
        weights = {name: engine.read_parameter(name).float() for name in engine.map.pieces()}
    return Outcome(tuple(losses), tuple(norms), weights, step_s)


def _batch(rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.arange(rows * length).mul(7).remainder(SIZES["vocab_size"]).view(rows, length)
    return {"input_ids": tokens, "labels": tokens}


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
