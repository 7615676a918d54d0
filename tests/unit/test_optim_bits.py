"""The native kernels have the bits of the readable reference: on every instruction set, for any length and any values."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_64_intdigest

from lohan import native
from lohan.errors import NativeError
from lohan.optim import SGD, AdamW, Optimizer, reference
from lohan.optim.base import Part

OPTIMIZERS: list[AdamW | SGD] = [
    AdamW(lr=1e-3),
    AdamW(lr=0.1, betas=(0.3, 0.95), eps=0.0),
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.0),
]
LENGTHS = st.integers(0, 200) | st.sampled_from([255, 1024, 4097])
RUNS = list(itertools.product(OPTIMIZERS, ["split", "plain"], native.INSTRUCTION_SETS))


def values(num: int, seed: int) -> Tensor:
    """fp32 of every magnitude from the smallest denormal to 1e18 (whose square is finite), with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(num, generator=generator) * 63 - 45
    sign = torch.randint(0, 2, (num,), generator=generator) * 2.0 - 1
    mantissa = torch.rand(num, generator=generator) + 1
    mixed = sign * mantissa * 10.0 ** exponent.clamp(max=18)
    ordinary = torch.randn(num, generator=generator)
    kind = torch.randint(0, 8, (num,), generator=generator)
    return torch.where(kind == 0, sign * 0.0, torch.where(kind < 4, mixed, ordinary))


def master(num: int, seed: int, form: str) -> tuple[Tensor, Tensor | None]:
    weight = values(num, seed)
    if form == "plain":
        return weight, None
    high, rest = torch.empty(num, dtype=torch.bfloat16), torch.empty(num, dtype=torch.int16)
    reference.split(weight, high, rest)
    return high, rest


def bits(tensor: Tensor) -> Tensor:
    """As integers, with one pattern for all NaN: which payload survives an operation is the processor's choice."""
    if tensor.dtype == torch.int16:
        return tensor
    return torch.where(tensor.isnan(), float("nan"), tensor).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def run(optimizer: Optimizer, form: str, num: int, seed: int, clip: float, cuts: tuple[int, ...] = ()) -> list[Tensor]:
    """Three updates of the same master, in pieces that end at `cuts`; returns the master and its state."""
    weight, rest = master(num, seed, form)
    state = [torch.zeros(num) for _ in optimizer.planes]
    edges = [0, *cuts, num]
    for step in (1, 2, 3):
        grad = values(num, seed + step).to(weight.dtype)
        for piece in itertools.starmap(slice, itertools.pairwise(edges)):
            part = None if rest is None else rest[piece]
            planes = [plane[piece] for plane in state]
            settings = {"lr": optimizer.lr / step, "clip": clip, "parts": [Part(0, len(grad[piece]), 0.1)]}
            optimizer.update(weight[piece], part, grad[piece], planes, step=step, **settings)
    return [tensor for tensor in (weight, rest, *state) if tensor is not None]


@pytest.mark.parametrize(("optimizer", "form", "isa"), RUNS)
@given(num=LENGTHS, seed=st.integers(0, 2**16), clip=st.sampled_from([1.0, 0.37]))
def test_native_updates_have_the_bits_of_the_reference(
    optimizer: AdamW | SGD, form: str, isa: str, num: int, seed: int, clip: float
) -> None:
    readable = dataclasses.replace(optimizer, kernel="reference")
    assert readable.kernel != optimizer.kernel
    with native.instruction_set(isa):
        fast = run(optimizer, form, num, seed, clip)
    for got, expected in zip(fast, run(readable, form, num, seed, clip), strict=True):
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", ["split", "plain"])
def test_an_update_does_not_depend_on_how_it_is_cut(optimizer: AdamW | SGD, form: str) -> None:
    whole = run(optimizer, form, 1000, 7, 0.5)
    pieces = run(optimizer, form, 1000, 7, 0.5, cuts=(1, 34, 500, 983))
    for got, expected in zip(pieces, whole, strict=True):
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_a_split_master_loses_nothing(isa: str) -> None:
    """Every upper half with the lower halves around zero and around the tie: also infinities, NaN and negative zero."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    pattern = (high[:, None] + low).flatten()
    weight, rest = torch.empty(len(pattern), dtype=torch.bfloat16), torch.empty(len(pattern), dtype=torch.int16)
    joined = torch.empty(len(pattern))
    with native.instruction_set(isa):
        native.split(pattern.view(torch.float32), weight, rest)
        native.join(weight, rest, joined)
    assert torch.equal(joined.view(torch.int32), pattern)
    expected = [torch.empty_like(weight), torch.empty_like(rest)]
    reference.split(pattern.view(torch.float32), *expected)
    assert torch.equal(weight.view(torch.int16), expected[0].view(torch.int16)) and torch.equal(rest, expected[1])


def test_the_bf16_weight_is_the_master_rounded_half_up() -> None:
    """It differs from round-to-nearest-even at ties only, and there it is the larger magnitude."""
    master_weight = values(10_000, 3)
    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    weight, rest = torch.empty(10_000, dtype=torch.bfloat16), torch.empty(10_000, dtype=torch.int16)
    native.split(master_weight, weight, rest)
    not_tie = (master_weight.view(torch.int32) & 0xFFFF) != 0x8000
    assert torch.equal(weight[not_tie], master_weight.to(torch.bfloat16)[not_tie])
    native.split(tie, weight[:2], rest[:2])
    assert weight[:2].view(torch.int16).tolist() == [0x3F81, 0x3F82]


def test_a_kernel_refuses_buffers_that_do_not_fit() -> None:
    weight, rest, grad = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16), torch.zeros(8).bfloat16()
    mean, square = torch.zeros(8), torch.zeros(8)
    settings: dict[str, Any] = {"step": 1, "lr": 1e-3, "clip": 1.0, "parts": [Part(0, 8, 0.0)]}
    optimizer = AdamW()
    with pytest.raises(NativeError, match="grad: a kernel wants 8 contiguous torch.bfloat16"):
        optimizer.update(weight, rest, grad.float(), [mean, square], **settings)
    with pytest.raises(NativeError, match="state"):
        optimizer.update(weight, rest, grad, [mean, square[:7]], **settings)
    with pytest.raises(NativeError, match="state"):
        optimizer.update(weight, rest, grad, [torch.zeros(16)[::2], square], **settings)
    with pytest.raises(NativeError, match="weight: a kernel wants 8 contiguous torch.float32"):
        optimizer.update(weight, None, grad, [mean, square], **settings)
    with pytest.raises(NativeError, match="rest"):
        optimizer.update(weight, rest.to(torch.int32), grad, [mean, square], **settings)


GRAIN = 8192


@pytest.mark.parametrize("num", [4096, GRAIN, 5 * 4096])
@pytest.mark.parametrize("wanted", [(False, True, True, True), (False, False, False, False), (True, True, True, True)])
@pytest.mark.parametrize(("optimizer", "form", "isa"), RUNS)
def test_checksums_on_the_way_are_those_of_the_bytes(
    optimizer: AdamW | SGD, form: str, isa: str, num: int, wanted: tuple[bool, ...]
) -> None:
    """Also where a part ends within a tile, and where nothing is updated; the updates are the same as without."""
    (weight, rest), grad = master(num, 3, form), values(num, 4).to(master(1, 0, form)[0].dtype)
    state = [values(num, 5 + plane).abs() for plane in range(len(optimizer.planes))]
    parts = [Part(0, 130, 0.1), Part(130, 2000, 0.0), Part(2048, num - 7, 0.1)]
    settings: dict[str, Any] = {"step": 3, "lr": 0.01, "clip": 0.5, "parts": parts}

    def arrays(state: list[Tensor], *master: Tensor | None) -> list[Tensor]:
        return [array for array in (*master, *state) if array is not None]

    def sums_of(array: Tensor) -> list[int]:
        data = array.view(torch.uint8).numpy().tobytes()
        size = GRAIN * array.element_size()
        return [xxh3_64_intdigest(data[start : start + size]) for start in range(0, len(data), size)]

    plain = [array.clone() for array in arrays(state, weight, rest)]
    before = [sums_of(array) for array in plain]
    optimizer.update(plain[0], None if rest is None else plain[1], grad, plain[-len(state) :], **settings)
    sums = native.Sums.of(num, GRAIN, wanted[: len(plain)])
    with native.instruction_set(isa):
        optimizer.update(weight, rest, grad, state, **settings, sums=sums)
    for got, expected in zip(arrays(state, weight, rest), plain, strict=True):
        assert torch.equal(bits(got), bits(expected))
    assert [found if found is None else found.tolist() for found in sums.before] == [
        one if is_wanted else None for one, is_wanted in zip(before, wanted, strict=False)
    ]
    assert [found.tolist() for found in sums.after] == [sums_of(array) for array in arrays(state, weight, rest)]


def test_checksums_of_the_reference_are_the_kernels() -> None:
    found = []
    for kernel in ("native", "reference"):
        weight, rest = master(GRAIN * 2, 3, "split")
        sums = native.Sums.of(GRAIN * 2, GRAIN, (False, True, True, True))
        state = [torch.ones(GRAIN * 2), torch.ones(GRAIN * 2)]
        settings: dict[str, Any] = {"step": 1, "lr": 0.1, "clip": 1.0, "parts": [Part(5, GRAIN + 9, 0.0)]}
        AdamW(kernel=kernel).update(weight, rest, values(GRAIN * 2, 9).bfloat16(), state, **settings, sums=sums)
        found.append([one.tolist() for one in (*sums.before[1:], *sums.after) if one is not None])
    assert found[0] == found[1]


def test_arrays_that_are_no_whole_tiles_have_no_checksums() -> None:
    weight, rest = master(520, 3, "split")
    settings: dict[str, Any] = {"step": 1, "lr": 0.1, "clip": 1.0, "parts": [Part(0, 520, 0.0)]}
    with pytest.raises(NativeError, match="not whole tiles"):
        SGD(lr=0.1).update(
            weight, rest, weight, [torch.ones(520)], **settings, sums=native.Sums.of(520, GRAIN, (False, False, False))
        )
