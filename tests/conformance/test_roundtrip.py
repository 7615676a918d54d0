"""Models in and out: what is read is what the files hold, what is written is what was read, and Transformers loads it."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from lohan.errors import ModelError, StoreError
from lohan.model import keys, weights_in
from lohan.model.load import open_model
from lohan.model.weights_out import export
from tests.checkpoints import rewritten, same_bits, saved, taken, tensors_of
from tests.tiny import CAUSAL, VOCABULARY, causal_model


def convert_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has a converter goes through it."""
    simple = weights_in._entries_in_order
    monkeypatch.setattr(weights_in, "_entries_in_order", lambda group: None if group.converter else simple(group))


def logits(model: nn.Module) -> Tensor:
    tokens = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens).logits
    return found


@pytest.mark.parametrize("name", CAUSAL)
def test_untrained_round_trip(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "in", name)
    opened = open_model(tmp_path / "in")
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    weights = taken(opened)
    assert list(weights) == [name for name, _ in opened.model.named_parameters()]
    assert same_bits(weights, dict(model.named_parameters()))

    source, expected = tensors_of(tmp_path / "in"), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "in"))
    shutil.rmtree(tmp_path / "in")  # saving needs nothing of it
    export(opened, weights.__getitem__, tmp_path / "out", max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert same_bits(tensors_of(tmp_path / "out"), source)
    again = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert same_bits({"logits": again}, {"logits": expected})


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_those_of_from_pretrained(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tmp_path, name)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = open_model(tmp_path, dtype=dtype).model
    assert same_bits(dict(model.named_buffers()), dict(expected.named_buffers()))
    assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in expected.named_parameters()}


def test_experts_are_read_straight_to_their_places(tmp_path: Path) -> None:
    for name in ("mixtral", "qwen3-moe"):
        saved(tmp_path / name, name)
        source = open_model(tmp_path / name).tensors
        assert isinstance(source, weights_in.FileTensors)
        homes = list(source.homes.values())
        assert all(isinstance(home, weights_in.Stored) for home in homes)
        assert sum(isinstance(home, weights_in.Stored) and len(home.entries) > 1 for home in homes) == 4


def test_other_conversions_go_through_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path, "mixtral")
    convert_all(monkeypatch)
    opened = open_model(tmp_path)
    assert isinstance(opened.tensors, weights_in.FileTensors)
    assert sum(isinstance(home, weights_in.Converted) for home in opened.tensors.homes.values()) == 4
    assert same_bits(taken(opened), dict(model.named_parameters()))


@pytest.mark.parametrize("converts", [False, True])
def test_any_range_of_any_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converts: bool) -> None:
    """In uneven parts, which begin anywhere in a block of the file and cross from one expert to the next."""
    model = saved(tmp_path, "mixtral")
    if converts:
        convert_all(monkeypatch)
    for source in (open_model(tmp_path).tensors, open_model(model).tensors):
        with closing(source.open_reader()) as reader:
            for name, parameter in model.named_parameters():
                flat, each = parameter.detach().reshape(-1), max(parameter.numel() // 7, 1)
                for first in range(0, flat.numel(), each):
                    into = torch.empty(min(each, flat.numel() - first), dtype=source.dtypes[name])
                    reader.read(name, first, into)
                    assert torch.equal(into, flat[first : first + each]), name


def test_what_was_converted_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "mixtral")
    convert_all(monkeypatch)
    opened = open_model(tmp_path)
    taken(opened)
    assert isinstance(opened.tensors, weights_in.FileTensors)
    converted = [home for home in opened.tensors.homes.values() if isinstance(home, weights_in.Converted)]
    assert converted and not any(home.made for home in converted)


def test_tensors_may_lie_anywhere_in_a_file(tmp_path: Path) -> None:
    """Here at odd bytes, as the format allows."""
    model = saved(tmp_path, "mixtral")
    rewritten(tmp_path, lambda tensors: None)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    assert same_bits(taken(open_model(tmp_path)), dict(model.named_parameters()))


def test_file_systems_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path, "mixtral")
    opens = os.open

    def refusing(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here", path)
        return opens(path, flags)

    opened = open_model(tmp_path)
    monkeypatch.setattr(os, "open", refusing)
    assert same_bits(taken(opened), dict(model.named_parameters()))


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    opened = open_model(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size - 7)
    with pytest.raises(StoreError, match=r"\.safetensors at byte \d+: wanted \d+ bytes, got 0"):
        taken(opened)


def test_names_without_the_base_prefix_stay_as_they_were(tmp_path: Path) -> None:
    """As the GPT-2 checkpoints on the hub: `wte.weight` instead of `transformer.wte.weight`."""
    model = causal_model("gpt2", torch.bfloat16)
    assert isinstance(model.base_model, PreTrainedModel)
    model.base_model.save_pretrained(tmp_path / "in")
    opened = open_model(tmp_path / "in")
    weights = taken(opened)
    assert same_bits(weights, dict(model.named_parameters()))
    export(opened, weights.__getitem__, tmp_path / "out")
    assert "wte.weight" in tensors_of(tmp_path / "out")
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))


def test_a_name_that_a_rule_would_spoil_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path, "llama")
    monkeypatch.setattr(keys, "get_model_conversion_mapping", lambda model: [WeightRenaming("up_proj", "upward")])
    assert same_bits(taken(open_model(tmp_path)), dict(model.named_parameters()))


def test_tied_weights_under_the_heads_name_only(tmp_path: Path) -> None:
    model = saved(tmp_path / "in", "llama-tied")
    rewritten(tmp_path / "in", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    opened = open_model(tmp_path / "in")
    weights = taken(opened)
    assert same_bits(weights, dict(model.named_parameters()))
    export(opened, weights.__getitem__, tmp_path / "out")
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))


def test_tied_weights_that_were_written_twice(tmp_path: Path) -> None:
    saved(tmp_path / "in", "llama-tied")
    rewritten(tmp_path / "in", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    opened = open_model(tmp_path / "in")
    weights = taken(opened)
    assert "lm_head.weight" not in weights
    export(opened, weights.__getitem__, tmp_path / "out")
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama-tied")
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        open_model(tmp_path)


@pytest.mark.parametrize("keep_fp32", [True, False])
def test_persistent_buffers_are_read_and_written(keep_fp32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's router bias is a buffer in the file, which Transformers keeps in fp32; most buffers take the model's dtype."""
    if not keep_fp32:
        monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keep_in_fp32_modules_strict", [])
    model = saved(tmp_path / "in", "deepseek", torch.float32)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    rewritten(tmp_path / "in", lambda t: t[name].copy_(torch.randn(4)))
    opened = open_model(tmp_path / "in", dtype=torch.bfloat16)
    assert name not in dict(model.named_parameters())
    assert opened.model.get_buffer(name).dtype == (torch.float32 if keep_fp32 else torch.bfloat16)
    weights = taken(opened)
    export(opened, weights.__getitem__, tmp_path / "out")
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))
    opened.model.get_buffer(name).fill_(0.25)
    export(opened, weights.__getitem__, tmp_path / "out")
    assert torch.equal(tensors_of(tmp_path / "out")[name], torch.full((4,), 0.25))
