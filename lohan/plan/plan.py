"""A Plan: what lives where, and how many buffers move the rest. Made by a policy or by hand; JSON in and out; no torch.

A plan never changes a bit of the result. What does (dtype, slices, tiles, the optimizer) is `config.Numerics`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from lohan.errors import OptionError
from lohan.model.shape import BUFFER_ALIGN
from lohan.schedule.ops import Tier


class Update(Enum):
    """When a unit's update runs."""

    IMMEDIATE = "immediate"
    """during the backward pass, as its gradient lands; only where nothing is clipped"""
    SPECULATE = "speculate"
    """the same, as if nothing were clipped; the gradient is kept, and if the norm turns out too large, the update is redone"""
    DEFER = "defer"
    """in the next forward pass, just before the unit is needed"""


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Where one unit's tensors live between uses."""

    weights: Tier = Tier.SSD
    """HOST: kept in RAM as well, so that passes need not read them"""
    state: Tier = Tier.SSD
    """HOST: master and optimizer state kept in RAM as well"""
    gradient: Tier = Tier.SSD
    """where the gradient waits for its update, if it has to wait"""
    update: Update = Update.SPECULATE

    def __post_init__(self) -> None:
        for name in ("weights", "state", "gradient"):
            if getattr(self, name) is Tier.DEVICE:
                raise OptionError(
                    f"plan.units[].{name}", "device", "a unit's tensors live on host or ssd", "Choose host or ssd"
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """What lives where, for every unit and site, and the buffers in between."""

    units: tuple[UnitPlan, ...]
    boundaries: tuple[Tier, ...]
    """for each site, where its input waits for the backward pass"""
    use_ssd: bool = True
    """False: nothing is on the SSD, RAM is the only copy (`placement="memory"`)"""
    chunk_elements: int = 4 * 2**20
    """parameters that one update operation handles"""
    prefetch: int = 1
    """visits that weights are fetched ahead of the one that computes"""
    weight_slots: int = 3
    """host buffers for weights on their way; at least prefetch + 1, one more lets writes trail behind"""
    gradient_slots: int = 2
    state_slots: int = 3
    """host buffers of one chunk of master and state"""
    boundary_slots: int = 2
    """host buffers for boundaries on their way to and from the SSD"""
    device_prefetch: int = 1
    device_weight_slots: int = 2
    device_gradient_slots: int = 2
    device_boundary_slots: int = 2

    def __post_init__(self) -> None:
        if self.chunk_elements % BUFFER_ALIGN or self.chunk_elements <= 0:
            reason = f"not a positive multiple of {BUFFER_ALIGN}"
            raise OptionError("plan.chunk_elements", self.chunk_elements, reason, f"Use a multiple of {BUFFER_ALIGN}")
        for slots, ahead in (("weight_slots", "prefetch"), ("device_weight_slots", "device_prefetch")):
            least = getattr(self, ahead) + 1
            if getattr(self, slots) < least:
                raise OptionError(f"plan.{slots}", getattr(self, slots), f"{ahead} needs {least}", f"Use at least {least}")
        for name in ("gradient_slots", "state_slots", "boundary_slots", "device_gradient_slots", "device_boundary_slots"):
            if getattr(self, name) < 1:
                raise OptionError(f"plan.{name}", getattr(self, name), "there must be one", "Use at least 1")
        if not self.use_ssd:
            self._check_memory()

    def _check_memory(self) -> None:
        """Without an SSD there is no old copy to go back to: everything is on the host and no update may be undone."""
        for unit in self.units:
            if Tier.SSD in (unit.weights, unit.state, unit.gradient):
                raise OptionError("plan.use_ssd", False, "a unit has tensors on ssd", "Put them on host, or use the SSD")
            if unit.update is not Update.DEFER:
                raise OptionError("plan.use_ssd", False, "RAM is the only copy, so updates must wait", "Use update: defer")
        if Tier.SSD in self.boundaries:
            raise OptionError("plan.use_ssd", False, "a boundary is on ssd", "Put it on host or device, or use the SSD")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote, or a person."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise OptionError("plan", str(path), f"it cannot be read ({error})", "Name a file that Plan.save wrote") from error
        return Plan.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, Enum):
                return value.value
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(item) for item in value]
            return value

        result: dict[str, Any] = plain(asdict(self))
        return result

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """OptionError for whatever is not what `to_dict` gives."""
        try:
            values = _known("plan.", data, {field.name for field in fields(Plan)})
            for name, value in values.items():
                kind = tuple if name in ("units", "boundaries") else bool if name == "use_ssd" else int
                if kind is not tuple and type(value) is not kind:
                    raise OptionError(f"plan.{name}", value, f"not of type {kind.__name__}", "Write it as Plan.save does")
            values["units"] = tuple(_unit_plan(unit) for unit in values["units"])
            values["boundaries"] = tuple(Tier(tier) for tier in values["boundaries"])
            return Plan(**values)
        except OptionError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OptionError("plan", "...", f"not a plan ({error!r:.200})", "Write it as Plan.save does") from error


def _unit_plan(data: Mapping[str, Any]) -> UnitPlan:
    kinds = {"weights": Tier, "state": Tier, "gradient": Tier, "update": Update}
    values: dict[str, Any] = {name: kinds[name](value) for name, value in _known("plan.units[].", data, kinds.keys()).items()}
    return UnitPlan(**values)


def _known(path: str, data: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    for name in data:
        if name not in names:
            raise OptionError(f"{path}{name}", data[name], "no such field", f"Known fields: {', '.join(sorted(names))}")
    return dict(data)
