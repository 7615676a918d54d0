"""A world that nobody knows: towns, people and animals, all invented from a seed, and what is to be read and asked of them.

    documents   sentences about everything there is: what the base model was pre-trained on (demo/pretrain.py)
    questions   with their answers, about three quarters of it: what the demonstration fine-tunes on
    held out    questions about the last quarter, which the model can only answer from what it has read

`python -m demo.world` writes questions.jsonl and held_out.jsonl, always with the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from demo.phrases import FIRST_NAMES, KINDS, Attribute, Kind

Row = dict[str, list[dict[str, str]]]
"""a conversation, in the `messages` format"""
SEED = 1
ENTITIES_PER_KIND = 400
NUM_HELD_OUT_QUESTIONS = 150
QUESTIONS = Path(__file__).with_name("questions.jsonl")
HELD_OUT = Path(__file__).with_name("held_out.jsonl")

ONSETS = "b br c cl d dr f fl g gr h k l m n p pr qu r s sk st t tr v w z".split()
VOWELS = "a e i o u au ei ie oo".split()
CODAS = "l ll m n nd nt r rk rn s sk t th x".split()
ENDINGS = {"town": "by dale ford holm mouth stead wick".split(), "person": "ert en ick in ov sen".split()}


@dataclass(frozen=True, slots=True)
class Entity:
    """A town, a person or an animal, and the facts about it, one for each attribute of its kind."""

    kind: Kind
    name: str
    facts: tuple[str, ...]

    @property
    def named(self) -> str:
        return self.kind.named.format(name=self.name)

    @property
    def stand_in(self) -> str:
        """what a text calls it once it has been named"""
        return self.kind.stand_in.format(first=self.name.split()[0])


def make_world(per_kind: int = ENTITIES_PER_KIND, seed: int = SEED) -> list[Entity]:
    """Everything there is: as many towns as people as animals."""
    rng = Random(seed)
    taken: set[str] = set()
    return [_entity(kind, taken, rng) for kind in KINDS for _ in range(per_kind)]


def _entity(kind: Kind, taken: set[str], rng: Random) -> Entity:
    name = _name(kind, rng)
    while name in taken:
        name = _name(kind, rng)
    taken.add(name)
    if kind.name == "person":
        name = f"{rng.choice(FIRST_NAMES)} {name}"
    return Entity(kind, name, tuple(rng.choice(attribute.values) for attribute in kind.attributes))


def _name(kind: Kind, rng: Random) -> str:
    """A word of two or three syllables."""
    start = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    end = (
        rng.choice(ENDINGS[kind.name]) if kind.name in ENDINGS else rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    )
    return start + end if kind.name == "animal" else (start + end).capitalize()


def is_held_out(number: int) -> bool:
    """Whether nothing is asked in training about the entity at this place of the world."""
    return number % 4 == 3


def write(pattern: str, who: str, value: str) -> str:
    """A sentence, its first letter a capital."""
    text = pattern.format(who=who, value=value)
    return text[0].upper() + text[1:]


def document(entity: Entity, rng: Random) -> str:
    """A short text about one entity: one fact or all, in any order and wording; named at first, and often afterwards."""
    facts = list(zip(entity.kind.attributes, entity.facts, strict=True))
    rng.shuffle(facts)
    text = ""
    for attribute, value in facts[: 1 if rng.random() < 0.25 else None]:
        who = entity.named if not text or rng.random() < 0.6 else entity.stand_in
        text += rng.choice(" \n") * bool(text) + write(rng.choice(attribute.sentences), who, value)
    return text


def beginnings(world: list[Entity]) -> Iterator[tuple[str, str]]:
    """Every fact as the beginning of a sentence and the rest of it: does a model know it?"""
    for entity in world:
        for attribute, value in zip(entity.kind.attributes, entity.facts, strict=True):
            sentence = write(attribute.sentences[0], entity.named, value)
            yield sentence.removesuffix(f" {value}."), f" {value}."


def questions(world: list[Entity], *, held_out: bool) -> list[Row]:
    """A question about each fact, in one of its wordings, as rows of `messages`; in an order of their own."""
    rng = Random(f"{SEED} {held_out}")
    rows = [
        _conversation(entity, attribute, value, rng)
        for number, entity in enumerate(world)
        for attribute, value in zip(entity.kind.attributes, entity.facts, strict=True)
        if is_held_out(number) == held_out
    ]
    rng.shuffle(rows)
    return rows


def _conversation(entity: Entity, attribute: Attribute, value: str, rng: Random) -> Row:
    question = write(rng.choice(attribute.questions), entity.named, value)
    answer = write(attribute.answer, entity.named, value)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def jsonl(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    world = make_world()
    QUESTIONS.write_text(jsonl(questions(world, held_out=False)))
    HELD_OUT.write_text(jsonl(questions(world, held_out=True)[:NUM_HELD_OUT_QUESTIONS]))


if __name__ == "__main__":
    main()
