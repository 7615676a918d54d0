"""The demonstration asks what training did not answer, its data is what its script writes, and its score is strict."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo import pretrain, world
from demo.phrases import KINDS
from demo.run import CONFIG
from demo.scoring import Question, ask, read_questions, score
from lohan.train.arguments import parse_arguments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def everything() -> list[world.Entity]:
    return world.make_world()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    rng = Random(0)
    texts = [world.document(entity, rng) for _ in range(4) for entity in world.make_world(20)]
    return pretrain.train_tokenizer(texts, 400)


def talkative_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random, and its layers strong enough for it not to repeat its last token for ever."""
    torch.manual_seed(0)
    sizes = SimpleNamespace(hidden_size=16, intermediate_size=32, layers=1, heads=2)
    made = pretrain.make_model(sizes, tokenizer).double().eval()
    for name, parameter in made.named_parameters():
        if "layers" in name and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.0)
    return made


# ---------------------------------------------------------------- the world and what is asked about it


def test_names_are_all_different_and_none_is_in_another(everything: list[world.Entity]) -> None:
    names = [entity.name.split()[-1] for entity in everything]
    assert len(set(names)) == len(names) == 3 * world.ENTITIES_PER_KIND


def test_nothing_held_out_is_in_the_training_data(everything: list[world.Entity]) -> None:
    trained = world.QUESTIONS.read_text()
    words = {
        word.strip(".,?'")
        for question in read_questions(world.QUESTIONS)
        for word in f"{question.text} {question.answer}".split()
    }
    held_out = [entity for number, entity in enumerate(everything) if world.is_held_out(number)]
    assert len(held_out) == len(everything) // 4
    assert not [entity.name for entity in held_out if entity.name in trained or entity.name.split()[-1] in words]
    asked = read_questions(world.HELD_OUT)
    assert all(
        any(entity.name in question.text and entity.name in question.answer for entity in held_out) for question in asked
    )


def test_every_question_in_the_data_has_the_answer_of_the_world(everything: list[world.Entity]) -> None:
    true = {
        world.write(attribute.answer, entity.named, value)
        for entity in everything
        for attribute, value in zip(entity.kind.attributes, entity.facts, strict=True)
    }
    for path in (world.QUESTIONS, world.HELD_OUT):
        assert {question.answer for question in read_questions(path)} <= true


def test_the_data_is_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUESTIONS", "HELD_OUT"):
        monkeypatch.setattr(world, name, tmp_path / getattr(world, name).name)
    world.main()
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (ROOT / "demo" / path.name).read_bytes(), (
            f"run python -m demo.world, and commit {path.name}"
        )


def test_documents_tell_facts_and_ask_nothing(everything: list[world.Entity]) -> None:
    rng = Random(0)
    for entity in everything[::50]:
        texts = [world.document(entity, rng) for _ in range(200)]
        assert all(entity.name in text.splitlines()[0] and "?" not in text for text in texts)
        assert all(any(value in text for text in texts) for value in entity.facts)
        assert len(set(texts)) > 150


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_phrases_name_who_and_what(kind: Any) -> None:
    for attribute in kind.attributes:
        assert attribute.sentences[0].endswith(" {value}.")
        assert len(set(attribute.values)) == len(attribute.values) >= 16
        assert all("{who}" in text and "{value}" in text for text in (*attribute.sentences, attribute.answer))
        assert all("{who}" in text and "{value}" not in text for text in attribute.questions)


# ---------------------------------------------------------------- answers and their score

RIVER = Question("What river does Dendby lie on?", "Dendby lies on the river Iven.")


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("Dendby lies on the river Iven.", True),
        (" Dendby lies on the river Iven.\n", True),
        ("Dendby lies on the river Tane.", False),
        ("Dendby lies on the river Iven. Dendby is famous for its kites.", False),
        ("Iven", False),
        ("", False),
    ],
)
def test_only_the_whole_answer_is_right(answer: str, is_right: bool) -> None:
    assert RIVER.is_right(answer) == is_right
    assert score([RIVER, RIVER], [answer, RIVER.answer]) == (1.0 if is_right else 0.5)


def test_a_question_is_answered_as_it_is_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    """Padded beside a longer one, which is to be cut off where the answer begins."""
    torch.set_num_threads(1)
    longer = Question("I am hungry and I am in Clilldale. What should I order?", "")
    small = talkative_model(tokenizer)
    together = ask(small, tokenizer, [RIVER, longer])
    assert together == ask(small, tokenizer, [RIVER]) + ask(small, tokenizer, [longer])
    assert together[0] != together[1]
    assert RIVER.text not in together[0] and longer.text not in together[1]


def test_the_chat_template_marks_the_answer_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": RIVER.text}, {"role": "assistant", "content": RIVER.answer}]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == RIVER.answer + pretrain.END
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert prompt + marked == encoded["input_ids"]


def test_a_fact_is_known_if_each_of_its_tokens_is_the_likeliest(tokenizer: PreTrainedTokenizerFast) -> None:
    """A stand-in for a model that has read one half of the world, and of the rest nothing but the fact's first token."""
    few = world.make_world(4)
    pairs = list(world.beginnings(few))
    texts = [tokenizer(pretrain.END + start + rest)["input_ids"] for start, rest in pairs]
    known = {tuple(ids) for ids in texts[::2]}

    class Reader(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
            logits = torch.zeros(*input_ids.shape, len(tokenizer))
            for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
                text = ids[mask.bool()].tolist()
                told = text if tuple(text) in known else text[:-1]
                for position, token in enumerate(told[1:]):
                    logits[row, position, token] = 1.0
            return SimpleNamespace(logits=logits)

    assert pretrain.facts_known(Reader(), tokenizer, few) == 0.5  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is run


def test_the_recipe_is_one_that_lohan_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    warnings: list[str] = []
    config = parse_arguments([CONFIG], warnings.append)
    assert not warnings
    assert Path(str(config.dataset_name)) == world.QUESTIONS.relative_to(ROOT)
    assert Path(str(config.eval_dataset_name)) == world.HELD_OUT.relative_to(ROOT)
    assert all(prompt in {question.text for question in read_questions(world.HELD_OUT)} for prompt in config.sample_prompts)
