"""Models that nobody here wrote, on every device: weights in slabs, backward on another thread, the bits of plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, MixtralConfig, PreTrainedConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from lohan.device.protocol import Device
from tests.conformance.devices import DEVICES, opened

LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
)
MIXTRAL = MixtralConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    num_local_experts=4,
    output_router_logits=True,
)
MIXTRAL_LOOP = MixtralConfig(**{**MIXTRAL.to_diff_dict(), "experts_implementation": "eager"})
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1)
MODELS: list[tuple[type[nn.Module], PreTrainedConfig]] = [
    (LlamaForCausalLM, LLAMA),
    (MixtralForCausalLM, MIXTRAL),
    (MixtralForCausalLM, MIXTRAL_LOOP),
    (GPT2LMHeadModel, GPT2),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    torch.use_deterministic_algorithms(True)
    yield from opened(request.param)
    torch.use_deterministic_algorithms(False)


class Unit(torch.autograd.Function):
    """A node of the outer graph: forward keeps nothing but its input, backward runs the unit again and calls autograd."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, module: nn.Module) -> Tensor:
        ctx.x, ctx.module = x.detach(), module  # type: ignore[attr-defined]
        with torch.no_grad():
            result: Tensor = module(x)
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        x = ctx.x.requires_grad_()  # type: ignore[attr-defined]
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), grad)  # type: ignore[attr-defined]
        return x.grad, None


def bind(device: Device, module: nn.Module) -> None:
    """Weights as views of one slab, gradients copied out of autograd into another as soon as they are there."""
    owners = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if p is not None]
    nbytes = sum(-(-p.numel() * p.element_size() // 256) * 256 for _, _, p in owners)
    weights, gradients = device.allocate(nbytes, "weights"), device.allocate(nbytes, "gradients")
    start = 0
    views: dict[int, Tensor] = {}
    for part, name, host in owners:
        if id(host) not in views:
            stop = start + host.numel() * host.element_size()
            weight, slot = (slab[start:stop].view(host.dtype).view(host.shape) for slab in (weights, gradients))
            with device.computing():
                weight.copy_(device.put(host.detach().cpu()))  # what is freed here must not be on its way on another stream
                slot.zero_()
            weight = weight.detach().requires_grad_()
            weight.slot = slot  # type: ignore[attr-defined]
            weight.register_post_accumulate_grad_hook(land)
            views[id(host)] = weight
            start += -(-(stop - start) // 256) * 256
        part._parameters[name] = views[id(host)]  # type: ignore[assignment]
    for part in module.modules():
        part._buffers.update({name: device.put(b) for name, b in part._buffers.items() if b is not None})


def land(weight: Tensor) -> None:
    weight.slot.add_(weight.grad)  # type: ignore[attr-defined]
    weight.grad = None


def weights_of(module: nn.Module) -> list[Tensor]:
    found = {id(p): p for part in module.modules() for p in part._parameters.values() if p is not None}
    return list(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unit_as_a_node_of_the_outer_graph(device: Device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    units = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)).to(dtype) for _ in range(3)]
    host = torch.randn(4, 5, 16).to(dtype)
    for unit in units:
        unit.to(device.torch_device)

    def run(x: Tensor) -> Tensor:
        x.requires_grad_()
        for unit in units:
            x = Unit.apply(x, unit)
        return x.float().square().mean()

    loss = run(host.clone().to(device.torch_device))
    loss.backward()
    expected = [w.grad for unit in units for w in weights_of(unit)]
    for unit in units:
        bind(device, unit)
    with device.computing():
        placed = run(device.put(host))
    device.run_backward(lambda: placed.backward())
    compare(device, placed, loss, [w.slot for unit in units for w in weights_of(unit)], expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "config"), MODELS, ids=["llama", "mixtral", "mixtral-loop", "gpt2-dropout"])
def test_transformers_give_the_bits_of_plain_torch(
    device: Device, kind: type[nn.Module], config: PreTrainedConfig, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = kind(config).to(device.torch_device, dtype).train()
    ids = torch.randint(0, 64, (2, 12))
    torch.manual_seed(5)
    plain = ids.to(device.torch_device)
    loss = model(input_ids=plain, labels=plain, use_cache=False).loss
    loss.backward()
    expected = [w.grad for w in weights_of(model)]
    bind(device, model)
    batch = device.put(ids)
    for _ in range(2):  # the second time the host knows all shapes, and runs ahead
        for weight in weights_of(model):
            with device.computing():
                weight.slot.zero_()  # type: ignore[attr-defined]
        device.seed(5)
        with device.computing():
            placed = model(input_ids=batch, labels=batch, use_cache=False).loss
        device.run_backward(lambda: placed.backward())  # noqa: B023 (called at once)
        compare(device, placed, loss, [w.slot for w in weights_of(model)], expected)  # type: ignore[attr-defined]


def compare(device: Device, loss: Tensor, expected_loss: Tensor, grads: list[Tensor], expected: list[Tensor | None]) -> None:
    assert torch.equal(device.fetch(loss), expected_loss.detach().cpu())
    assert any(grad is not None and grad.any() for grad in expected)
    for grad, wanted in zip(grads, expected, strict=True):
        assert torch.equal(device.fetch(grad), torch.zeros(grad.shape, dtype=grad.dtype) if wanted is None else wanted.cpu())
