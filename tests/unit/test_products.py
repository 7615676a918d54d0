"""bf16 products on processors without bf16 arithmetic: widened, summed in fp32, rounded once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lohan.device.products import PRODUCTS, _has_bf16, forced, products


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).bfloat16()


def few_bits(*shape: int) -> torch.Tensor:
    """Small whole numbers: fp32 sums of their products are exact."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def test_every_kind_of_product_is_widened_and_rounded_once() -> None:
    a, b, c = few_bits(5, 300), few_bits(300, 7), few_bits(5, 7)
    with forced(True), products():
        assert torch.equal(a @ b, exact(a, b))
        assert torch.equal(torch.addmm(c, a, b), (a.double() @ b.double() + c.double()).bfloat16())
        assert torch.equal(torch.bmm(a[None], b[None])[0], exact(a, b))
        assert torch.equal(torch.baddbmm(c[None], a[None], b[None])[0], torch.addmm(c, a, b))
        assert torch.equal(torch.nn.functional.linear(a[None], b.T)[0], exact(a, b))


def test_products_of_the_backward_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    weight = few_bits(6, 300).requires_grad_()
    with forced(True), products() as mode:
        assert mode is not None
        kept = type(mode).__torch_dispatch__

        def spy(self: object, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None) -> object:
            seen.append(func in PRODUCTS)
            return kept(self, func, types, args, kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(type(mode), "__torch_dispatch__", spy)
        torch.nn.functional.linear(few_bits(4, 300), weight).sum().backward()
    assert sum(seen) == 2
    assert weight.grad is not None and torch.equal(weight.grad, exact(torch.ones(6, 4), few_bits(4, 300).float()))


def test_other_dtypes_and_processors_with_the_arithmetic_keep_torchs_kernels(tmp_path: Path) -> None:
    a, b = torch.randn(5, 300), torch.randn(300, 7)
    expected = a @ b
    with forced(True), products():
        assert torch.equal(a @ b, expected)
    with forced(False), products() as mode:
        assert mode is None
    for flags, has in (
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("Features : fp asimd bf16", True),
        ("flags : avx2", False),
    ):
        cpuinfo = tmp_path / flags[-4:]
        cpuinfo.write_text(f"processor : 0\n{flags}\n")
        assert _has_bf16(cpuinfo) is has
