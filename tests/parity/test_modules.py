"""Models that are no language models, with a loss function: bit for bit in every placement, and close to stock torch in fp32.

Also what cannot be run, and says so: modules that run twice, forwards that change their way, gradients that lohan cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lohan import AdamW
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ModelError, OptionError, ScheduleError
from tests.parity.harness import (
    Batch,
    Outcome,
    assert_close,
    batch,
    groups_of,
    masters_of,
    open_engine,
    stock,
    tiny_model,
    train,
)
from tests.tiny import Perceptrons, t5_model

LIMIT = 0.8


def classify(model: nn.Module, one: Mapping[str, Any]) -> Tensor:
    return functional.cross_entropy(model(one["x"]).float(), one["y"])


def own_loss(model: nn.Module, one: Mapping[str, Any]) -> Tensor:
    loss: Tensor = model(**one).loss
    return loss


def vectors(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 8, generator=generator), "y": torch.randint(0, 4, (rows,), generator=generator)}


def images(rows: int, side: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, side, side, generator=generator)
    return {"x": x, "y": torch.randint(0, 4, (rows,), generator=generator)}


def pairs(rows: int, length: int, target_length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, 300, (rows, num), generator=generator) for num in (length, target_length)]
    return {"input_ids": tokens[0], "labels": tokens[1]}


class Blocks(nn.Module):
    """Convolutions with running statistics, of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Dropping(Blocks):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.3), nn.ReLU(inplace=True))


class Layers(nn.Module):
    """Layers that are used, one that runs for nothing, two that never run, and one with a weight that has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.aside = nn.Linear(8, 8)
        self.never = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.partly = nn.Bilinear(8, 8, 8)
        self.head = nn.Linear(8, 4)
        self.partly.register_parameter("spare", nn.Parameter(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        self.aside(x)
        logits: Tensor = self.head(x + self.partly(x, x))
        return logits


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    data: list[list[Batch]]
    loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor] = classify
    is_random: bool = False
    """dropout: stock torch draws other numbers"""


def t5() -> nn.Module:
    """Without dropout, wherever it hides."""
    model = t5_model()
    model.config.decoder_start_token_id = 0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


VECTORS = [[vectors(4, 1), vectors(2, 2)], [vectors(3, 3)], [vectors(9, 4), vectors(1, 5), vectors(2, 6)]]
IMAGES = [[images(4, 6, 1), images(2, 6, 2)], [images(3, 6, 3), images(2, 8, 4)], [images(9, 9, 5), images(2, 8, 6)]]
PAIRS = [[pairs(2, 7, 5, 1), pairs(1, 9, 6, 2)], [pairs(3, 9, 7, 3), pairs(1, 4, 8, 4)]]
CASES = {
    "perceptrons": Case(Perceptrons, VECTORS),
    "partly used": Case(Layers, VECTORS),
    "convolutions": Case(Blocks, IMAGES),
    "convolutions, dropout": Case(Dropping, IMAGES, is_random=True),
    "encoder and decoder": Case(t5, PAIRS, own_loss),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_placement_gives_the_bits_of_memory(case: Case) -> None:
    outcomes = []
    emulated = EmulatedDevice(64 * 2**20, jitter_s=0.0005)
    for settings in ({"placement": "memory"}, {}, {"device": emulated}, {"device": "cpu", "slice_rows": 0}):
        with open_engine(seeded(case.make), dtype="fp32", max_grad_norm=LIMIT, **settings) as engine:
            outcomes.append(train(engine, case.data, loss_fn=case.loss_fn))
    for outcome in outcomes[1:]:
        outcome.assert_same(outcomes[0])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_random])
def test_as_stock_torch_trains(name: str) -> None:
    case = CASES[name]
    model = seeded(case.make).train()
    began = masters_of(model)
    optimizer = torch.optim.AdamW(groups_of(model), lr=2e-5, weight_decay=0.01)
    expected = stock(model, optimizer, LIMIT, case.data, case.loss_fn, lambda one: one.get("labels", one.get("y")).numel())
    placed = seeded(case.make)
    with open_engine(placed, dtype="fp32", optimizer=AdamW(lr=2e-5), max_grad_norm=LIMIT) as engine:
        outcome = train(engine, case.data, loss_fn=case.loss_fn)
    assert_close(outcome, expected, began)
    for (name, buffer), (_, other) in zip(model.named_buffers(), placed.named_buffers(), strict=True):
        assert torch.allclose(buffer, other, rtol=1e-5), name
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert all(torch.equal(outcome.masters[name], began[name]) for name in unused)
    assert bool(unused) == (case.make is Layers)


def test_bf16() -> None:
    """The batch comes in the dtype that the model computes in."""
    data = [[{**one, "x": one["x"].bfloat16()} for one in step] for step in VECTORS]
    outcomes: list[Outcome] = []
    for placement in ("memory", "auto"):
        with open_engine(seeded(Layers), placement=placement, max_grad_norm=LIMIT) as engine:
            outcomes.append(train(engine, data, loss_fn=classify))
    outcomes[1].assert_same(outcomes[0])


def test_a_loss_function_for_a_language_model() -> None:
    """The same cross-entropy, written by hand: the same loss but for the last bits; a cache asked for by default stays out."""
    by_hand: list[Outcome] = []
    data = [[batch(2, 9, 1), batch(1, 7, 2)]] * 3

    def loss_fn(model: nn.Module, one: Mapping[str, Any]) -> Tensor:
        logits = model(input_ids=one["input_ids"]).logits[:, :-1].flatten(0, 1).float()
        return functional.cross_entropy(logits, one["labels"][:, 1:].flatten())

    for settings in ({"placement": "memory"}, {}):
        with open_engine(tiny_model("llama"), dtype="fp32", **settings) as engine:
            by_hand.append(train(engine, data, loss_fn=loss_fn))
    by_hand[1].assert_same(by_hand[0])
    with open_engine(tiny_model("llama"), dtype="fp32") as engine:
        own = train(engine, data)
    assert by_hand[0].losses == pytest.approx(own.losses, rel=1e-5) and by_hand[0].norms == pytest.approx(own.norms, rel=1e-5)


# ---------------------------------------------------------------- refusals


class Odd(nn.Module):
    """Two layers, run in a way that a test chooses."""

    def __init__(self, way: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.way, self.departs = way, False

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.way(self, x))
        return logits


def twice(model: Odd, x: Tensor) -> Tensor:
    return model.layers[0](model.layers[1](model.layers[0](x)))  # type: ignore[no-any-return]


def turned(model: Odd, x: Tensor) -> Tensor:
    one, other = reversed(list(model.layers)) if model.departs else model.layers
    return other(one(x))  # type: ignore[no-any-return]


def shortened(model: Odd, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    return x if model.departs else model.layers[1](x)  # type: ignore[no-any-return]


def cut_off(model: Odd, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    return model.layers[1](x.detach() if model.departs else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (turned, "expected layers.0, got layers.1"),
        (shortened, "expected layers.1, got head"),
        (cut_off, "expected op .* backward .*, got the end"),
    ],
)
@pytest.mark.parametrize("placement", ["memory", "auto"])
def test_a_departure_from_the_recorded_order(way: Callable[[Odd, Tensor], Tensor], message: str, placement: str) -> None:
    model = Odd(way)
    with open_engine(model, dtype="fp32", placement=placement) as engine:
        engine.step(vectors(4, 1), loss_fn=classify)
        model.departs = True
        with pytest.raises(ScheduleError, match=message):
            engine.step(vectors(4, 2), loss_fn=classify)


class Boxed(nn.Module):
    """Hands its result on in an object of its own."""

    @dataclass
    class Box:
        x: Tensor

    class Fill(nn.Linear):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return Boxed.Box(super().forward(x))

    def __init__(self) -> None:
        super().__init__()
        self.fill = self.Fill(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        box: Boxed.Box = self.fill(x)
        return box.x


def test_what_cannot_be_run_is_refused() -> None:
    with open_engine(Odd(twice), dtype="fp32") as engine, pytest.raises(ModelError, match=r"layers\.0 runs twice"):
        engine.step(vectors(4, 1), loss_fn=classify)
    with open_engine(Boxed(), dtype="fp32") as engine, pytest.raises(ModelError, match="inside a Box"):
        engine.step(vectors(4, 1), loss_fn=classify)
    with open_engine(Perceptrons(), dtype="fp32") as engine, pytest.raises(OptionError, match="Pass loss_fn="):
        engine.step(vectors(4, 1))
    with open_engine(t5(), dtype="fp32") as engine, pytest.raises(ModelError, match="cache of keys"):
        engine.step(pairs(2, 5, 4, 1), loss_fn=lambda model, one: model(**one, use_cache=True).loss)
    with open_engine(Perceptrons(), dtype="fp32") as engine, pytest.raises(ModelError, match="nothing to train"):
        engine.step(vectors(4, 1), loss_fn=lambda model, one: classify(model, one).detach())
