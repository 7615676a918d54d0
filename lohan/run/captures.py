"""What a model collects from inside its units while it runs, as extra outputs of the unit.

Transformers' hooks put the outputs of inner modules (the router logits of experts, from which an auxiliary loss comes) into a
collector that belongs to the calling context. A unit runs outside of that context, and without a graph. So it runs with a
collector of its own, what that collects leaves the unit beside its result, as outputs through which gradients flow, and the
slice puts them into the collector of its own context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.utils.output_capturing import _active_collector

_ACTIVE: Any = _active_collector
Collected = dict[str, list[Any]]
"""what was collected, by name"""


def num_collected() -> dict[str, int]:
    """What the calling context collects, and how much of each it has so far."""
    collector: Mapping[str, Any] = _ACTIVE.get() or {}
    return {name: len(values) for name, values in collector.items() if isinstance(values, list)}


@contextmanager
def collecting(before: Mapping[str, int]) -> Iterator[Collected]:
    """Collect as a context would that has collected so much already; what is new is there at the end."""
    collected: Collected = {}
    collector: Collected = {name: [None] * num for name, num in before.items()}
    token = _ACTIVE.set(collector)
    try:
        yield collected
    finally:
        _ACTIVE.reset(token)
        collected.update({name: values[before[name] :] for name, values in collector.items()})


def hand_over(collected: Collected) -> None:
    """Into the collector of the calling context."""
    collector = _ACTIVE.get()
    for name, values in collected.items():
        collector[name].extend(values)
