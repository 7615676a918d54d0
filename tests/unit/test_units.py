"""Units: every parameter is in exactly one, edges are split by rows, tied weights move once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lohan.errors import ModelError
from lohan.model.load import build_on_meta
from lohan.model.shape import UnitKind
from lohan.model.units import ModelMap, discover
from tests.tiny import CAUSAL, Entry, Perceptrons, causal_model, t5_model

MODELS = {name: lambda name=name: causal_model(name) for name in CAUSAL} | {"t5": t5_model, "perceptrons": Perceptrons}
NUM_BLOCKS = {"t5": 4, "perceptrons": 3}


def covered(found: ModelMap, model: nn.Module) -> None:
    """Every element of every parameter lies in exactly one place of one unit, and its places in the modules are right."""
    pieces = found.pieces()
    assert pieces.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        rows = 0
        for _, tensor in pieces[name]:
            assert tensor.first_row == rows and tensor.shape[1:] == tuple(parameter.shape[1:])
            assert tensor.trainable == parameter.requires_grad
            rows += tensor.shape[0]
        assert rows == parameter.shape[0]
    for unit in found.units:
        for binding in unit.bindings:
            assert binding.module._parameters[binding.attribute] is model.get_parameter(binding.tensor.name)
            assert unit.index in found.sites[binding.site].units
    assert sum(unit.shape.num_parameters for unit in found.units) == sum(p.numel() for p in model.parameters())


def lent(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a child of the module has the parameter too, as in BERT, whose prediction head lends its bias to the decoder."""
    return any(parameter is other for child in module.children() for other in child.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_exactly_one_unit(name: str) -> None:
    model = MODELS[name]()
    found = discover(model)
    covered(found, model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    blocks = [site for site in found.sites if any(site.module in set(children) for children in lists)]
    assert len(blocks) == NUM_BLOCKS.get(name, 2)
    assert all(len(site.units) == 1 and site.kind is UnitKind.MODULE for site in blocks)
    bound = {(id(b.module), b.attribute) for unit in found.units for b in unit.bindings}
    assert bound == {(id(m), a) for m in model.modules() for a, p in m._parameters.items() if p is not None and not lent(m, p)}


def test_a_meta_model_has_the_units_of_a_real_one() -> None:
    for name in ("llama", "mixtral", "gemma3"):
        real, meta = discover(causal_model(name)), discover(build_on_meta(CAUSAL[name](), torch.float32))
        assert [unit.shape for unit in real.units] == [unit.shape for unit in meta.units]


def test_large_edges_are_split_by_rows() -> None:
    model = causal_model("llama", vocab_size=1000, num_hidden_layers=1)
    found = discover(model, piece_elements=9000)
    covered(found, model)
    embedding, head = found.sites[0], found.sites[-1]
    assert (embedding.kind, head.kind) == (UnitKind.EMBEDDING, UnitKind.HEAD)
    assert len(embedding.units) == len(head.units) == 4
    shapes = [found.units[index].shape for index in embedding.units]
    assert [shape.name for shape in shapes] == [f"model.embed_tokens[{i}]" for i in range(4)]
    assert [shape.tensors[0].shape for shape in shapes] == [(256, 32), (256, 32), (256, 32), (232, 32)]
    assert not set(embedding.units) & set(head.units)


def test_pieces_are_at_most_the_largest_block() -> None:
    found = discover(causal_model("llama", vocab_size=5000))
    blocks = [unit.shape.elements for unit in found.units if unit.shape.kind is UnitKind.MODULE]
    edges = [unit.shape.elements for unit in found.units if unit.shape.kind is not UnitKind.MODULE]
    assert len(edges) > 2 and max(edges) <= max(blocks)


def test_a_split_head_takes_its_bias_along() -> None:
    model = causal_model("phi", vocab_size=1000)
    found = discover(model, piece_elements=9000)
    covered(found, model)
    for index in found.sites[-1].units:
        weight, bias = found.units[index].shape.tensors
        assert (weight.name, bias.name) == ("lm_head.weight", "lm_head.bias")
        assert (weight.first_row, weight.shape[0]) == (bias.first_row, bias.shape[0])
        assert (weight.decay, bias.decay) == (True, False)


def test_tied_weights_are_one_storage_that_two_sites_visit() -> None:
    model = causal_model("llama-tied", vocab_size=1000)
    found = discover(model, piece_elements=9000)
    covered(found, model)
    embedding, head = found.sites[0], found.sites[-1]
    assert (embedding.name, head.name) == ("model.embed_tokens", "lm_head")
    assert embedding.units == head.units and len(head.units) > 1
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert [binding.module for _, binding in found.bindings(head)] == [head.module] * len(head.units)
    assert [binding.module for _, binding in found.bindings(embedding)] == [embedding.module] * len(head.units)


def test_t5_ties_its_embedding_four_times() -> None:
    found = discover(t5_model())
    visits = [site.name for site in found.sites if 0 in site.units]
    assert visits == ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]


def test_norms_and_biases_are_not_decayed() -> None:
    for name in ("gpt2", "gemma3", "mixtral"):
        tensors = {t.name: t for unit in discover(causal_model(name)).units for t in unit.shape.tensors}
        kept = {n for n, t in tensors.items() if not t.decay}
        assert kept == {n for n in tensors if "norm" in n or "ln_" in n or n.endswith("bias")}
    model = nn.ModuleDict({"norm": nn.LayerNorm((4, 16)), "entry": Entry()})
    decayed = [t.name for unit in discover(model).units for t in unit.shape.tensors if t.decay]
    assert decayed == ["entry.project.weight"]


def test_frozen_parameters_have_a_buffer_of_their_own() -> None:
    model = causal_model("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    found = discover(model)
    covered(found, model)
    block = next(unit.shape for unit in found.units if unit.shape.name == "model.layers.0")
    assert block.frozen_elements >= 3 * 32 * 96 and 0 < block.num_trainable < block.num_parameters
    assert found.units[0].shape.trainable_elements == 0


def test_positions_computed_inside_an_embedding_run_as_a_module() -> None:
    sites = {site.name: site.kind for site in discover(causal_model("opt")).sites}
    assert sites["model.decoder.embed_positions"] is UnitKind.MODULE
    assert sites["model.decoder.embed_tokens"] is UnitKind.EMBEDDING


def test_an_input_embedding_that_scales_its_rows_is_an_embedding() -> None:
    model = causal_model("gemma3")
    assert type(model.model.embed_tokens).forward is not nn.Embedding.forward
    assert discover(model).sites[0].kind is UnitKind.EMBEDDING


def test_a_parameter_of_the_whole_model_is_refused() -> None:
    model = Perceptrons()
    model.gate = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelError, match="gate: Perceptrons has parameters itself"):
        discover(model)


def test_blocks_that_share_a_parameter_are_refused() -> None:
    model = causal_model("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match=r"layers\.1 shares its weight with model\.layers\.0\.mlp\.up_proj\.weight"):
        discover(model)


def test_a_parameter_used_twice_within_a_block_moves_once() -> None:
    model = causal_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight = mlp.up_proj.weight
    found = discover(model)
    covered(found, model)
    name = "model.layers.0.mlp.gate_proj.weight"
    bindings = [binding for unit in found.units for binding in unit.bindings if binding.tensor.name == name]
    assert [binding.module for binding in bindings] == [mlp.gate_proj, mlp.up_proj]


def test_an_embedding_that_renormalises_itself_is_refused() -> None:
    with pytest.raises(ModelError, match="max_norm"):
        discover(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 2)))
