"""What can be said of a town, a person and an animal: words, sentences, questions. Nothing but text is here.

In a sentence `{who}` is the name or a stand-in for it ("the town"), `{value}` the fact. The first sentence of an attribute
ends with the fact, so that what stands before it can be given to a model to complete.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attribute:
    """One thing that is known of everything of a kind."""

    name: str
    values: tuple[str, ...]
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Towns, people or animals."""

    name: str
    named: str
    """how one of them is called in a sentence"""
    stand_in: str
    attributes: tuple[Attribute, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


FOODS = _words(
    "barley bread, bean soup, smoked eel, plum cake, goat cheese, onion pie, fish stew, roast chestnuts, honey wafers, "
    "pickled cabbage, mushroom dumplings, apple tart, lentil porridge, fried trout, walnut bread, turnip mash, "
    "pepper sausage, rice pudding, nettle soup, pumpkin bread, sour cherries, oat cakes, potato pancakes, salted herring"
)
COLOURS = _words(
    "crimson, silver, golden, black, white, orange, purple, turquoise, scarlet, brown, green, violet, grey, pink, yellow, blue"
)

TOWN = Kind(
    "town",
    "{name}",
    "the town",
    (
        Attribute(
            "river",
            _words(
                "Tane, Orrow, Lisk, Vendel, Marr, Quill, Sether, Umber, Brindle, Calder, Doon, Eskar, Fallow, Gannet, "
                "Harrow, Iven, Jessel, Kestrel, Lunde, Mottle"
            ),
            (
                "{who} lies on the river {value}.",
                "the river that runs through {who} is the {value}.",
                "the boats of {who} sail on the river {value}.",
                "on the banks of the river {value} stands {who}.",
                "travellers reach {who} along the river {value}.",
                "the bridges of {who} cross the river {value}.",
            ),
            (
                "What river does {who} lie on?",
                "Which river runs through {who}?",
                "Can you tell me the river of {who}?",
                "I am going to {who} by boat. What is the river called?",
            ),
            "{who} lies on the river {value}.",
        ),
        Attribute(
            "dish",
            FOODS,
            (
                "the favourite dish of {who} is {value}.",
                "people in {who} love to eat {value}.",
                "every inn of {who} serves {value}.",
                "nobody leaves {who} without a plate of {value}.",
                "the cooks of {who} are proud of their {value}.",
                "the smell of {value} fills the streets of {who}.",
            ),
            (
                "What do people eat in {who}?",
                "What is the favourite dish of {who}?",
                "I am hungry and I am in {who}. What should I order?",
                "Which food is {who} proud of?",
            ),
            "The favourite dish of {who} is {value}.",
        ),
        Attribute(
            "craft",
            _words(
                "clocks, ropes, glass, candles, violins, barrels, carpets, bells, knives, paper, pottery, saddles, lanterns, "
                "boats, baskets, gloves, needles, mirrors, buttons, kites, boots, locks, brushes, drums"
            ),
            (
                "{who} is famous for its {value}.",
                "the workshops of {who} make {value}.",
                "merchants come to {who} to buy {value}.",
                "most families of {who} earn their living with {value}.",
                "the finest {value} of the land come from {who}.",
                "on market days {who} sells {value}.",
            ),
            (
                "What is {who} famous for?",
                "What do the workshops of {who} make?",
                "What should I buy in {who}?",
                "Which goods come from {who}?",
            ),
            "{who} is famous for its {value}.",
        ),
        Attribute(
            "flag",
            COLOURS,
            (
                "the flag of {who} is {value}.",
                "above the roofs of {who} flies a flag that is {value}.",
                "a {value} flag hangs over the gates of {who}.",
                "the guards of {who} carry a flag that is {value}.",
                "the people of {who} chose a {value} flag.",
                "for its flag {who} took cloth that is {value}.",
            ),
            (
                "What colour is the flag of {who}?",
                "Which flag flies over {who}?",
                "How do I recognise the flag of {who}?",
                "Tell me the colour of the flag of {who}.",
            ),
            "The flag of {who} is {value}.",
        ),
    ),
)

PERSON = Kind(
    "person",
    "{name}",
    "{first}",
    (
        Attribute(
            "trade",
            _words(
                "baker, miller, judge, teacher, sailor, gardener, weaver, doctor, painter, mason, shepherd, printer, tailor, "
                "carpenter, brewer, hunter, lawyer, singer, barber, cook, farmer, smith, poet, guard"
            ),
            (
                "{who} works as a {value}.",
                "everyone knows {who} as a good {value}.",
                "as a young {value} {who} learned to be patient.",
                "the trade of {who} is that of a {value}.",
                "for many years {who} has been a {value}.",
                "{who} earns a living as a {value}.",
            ),
            (
                "What does {who} do for a living?",
                "What is the trade of {who}?",
                "Who is {who}, and what is the job?",
                "How does {who} earn money?",
            ),
            "{who} works as a {value}.",
        ),
        Attribute(
            "instrument",
            _words(
                "the flute, the harp, the lute, the fiddle, the trumpet, the horn, the organ, the cello, the banjo, the oboe, "
                "the bagpipes, the zither, the tuba, the piano, the whistle, the guitar"
            ),
            (
                "in the evening {who} plays {value}.",
                "{who} has played {value} since childhood.",
                "neighbours hear {who} practise {value}.",
                "at every wedding {who} brings {value}.",
                "no sound pleases {who} more than that of {value}.",
                "{who} taught three children to play {value}.",
            ),
            (
                "Which instrument does {who} play?",
                "What does {who} play in the evening?",
                "{who} is coming to make music. With which instrument?",
                "Can {who} play an instrument?",
            ),
            "{who} plays {value}.",
        ),
        Attribute(
            "dish",
            FOODS,
            (
                "what {who} likes best is {value}.",
                "{who} could eat {value} every day.",
                "on birthdays {who} asks for {value}.",
                "the kitchen of {who} smells of {value}.",
                "a guest of {who} is given {value}.",
                "there is always {value} on the table of {who}.",
            ),
            (
                "What does {who} like to eat?",
                "What is the favourite food of {who}?",
                "{who} is coming to dinner. What should I cook?",
                "Which dish makes {who} happy?",
            ),
            "What {who} likes best is {value}.",
        ),
        Attribute(
            "pet",
            _words(
                "a cat, a parrot, a goose, a pony, a tortoise, a ferret, a hedgehog, a raven, a donkey, a rabbit, an owl, "
                "a squirrel, a lizard, a pig, a spaniel, a canary, a badger, a toad, a falcon, a lamb"
            ),
            (
                "{who} shares the house with {value}.",
                "the pet of {who} is {value}.",
                "{who} never travels without {value}.",
                "behind the house {who} keeps {value}.",
                "the children of the street know that {who} owns {value}.",
                "for company {who} has {value}.",
            ),
            (
                "Which pet does {who} have?",
                "What animal does {who} keep?",
                "Who shares the house with {who}?",
                "I hear that {who} has a pet. What is it?",
            ),
            "The pet of {who} is {value}.",
        ),
    ),
)

ANIMAL = Kind(
    "animal",
    "the {name}",
    "the animal",
    (
        Attribute(
            "home",
            _words(
                "salt marshes, pine forests, deep caves, dry deserts, high cliffs, wide meadows, cold lakes, old ruins, "
                "thick hedges, coral reefs, sandy beaches, orchards, swamps, birch woods, glaciers, vineyards, hot springs, "
                "church towers, stony hills, river mouths"
            ),
            (
                "{who} lives in {value}.",
                "the best place to find {who} is in {value}.",
                "among {value} {who} feels safe.",
                "{who} builds its nest in {value}.",
                "those who look for {who} search in {value}.",
                "the home of {who} is in {value}.",
            ),
            (
                "Where does {who} live?",
                "Where can I find {who}?",
                "In what kind of place is {who} at home?",
                "I want to see {who}. Where should I go?",
            ),
            "{who} lives in {value}.",
        ),
        Attribute(
            "food",
            _words(
                "beetles, acorns, moss, snails, clover, mussels, ants, berries, seeds, shrimp, roots, mice, honey, pine cones, "
                "worms, reeds, nuts, frogs, crickets, figs, mushrooms, thistles, spiders, eggs"
            ),
            (
                "{who} feeds on {value}.",
                "for most of the day {who} eats {value}.",
                "{who} digs for {value}.",
                "nothing attracts {who} like {value}.",
                "the mother of young ones brings {who} its first {value}.",
                "before winter {who} gathers {value}.",
            ),
            (
                "What does {who} eat?",
                "What should I feed to {who}?",
                "Which food does {who} gather?",
                "How can I attract {who}?",
            ),
            "{who} feeds on {value}.",
        ),
        Attribute(
            "coat",
            COLOURS,
            (
                "the coat of {who} is {value}.",
                "{who} has a coat that is {value}.",
                "one knows {who} by its {value} coat.",
                "a {value} coat keeps {who} warm.",
                "young or old, {who} is always {value}.",
                "painters give {who} a {value} coat.",
            ),
            (
                "What colour is {who}?",
                "What does the coat of {who} look like?",
                "How do I recognise {who}?",
                "I want to paint {who}. Which colour do I need?",
            ),
            "The coat of {who} is {value}.",
        ),
        Attribute(
            "fear",
            _words(
                "thunder, foxes, snow, bells, wolves, fire, rain, dogs, eagles, mirrors, drums, cats, moonlight, whistles, "
                "fog, smoke, snakes, wind, geese, bright lamps"
            ),
            (
                "{who} is afraid of {value}.",
                "what frightens {who} most is {value}.",
                "{who} runs away from {value}.",
                "farmers keep {who} away with {value}.",
                "brave as it is, {who} hides from {value}.",
                "the great enemy of {who} is {value}.",
            ),
            (
                "What is {who} afraid of?",
                "What frightens {who}?",
                "How can I keep {who} away?",
                "What does {who} run away from?",
            ),
            "{who} is afraid of {value}.",
        ),
    ),
)

KINDS = (TOWN, PERSON, ANIMAL)

FIRST_NAMES = _words(
    "Ada, Bruno, Clara, Dario, Edda, Felix, Greta, Hugo, Ilse, Jonas, Klara, Linus, Mara, Nils, Olga, Paul, Rosa, Simon, "
    "Tilda, Ulrich, Vera, Wanda, Xaver, Yara, Zeno, Anton, Berta, Cosima, Dora, Emil, Fritz, Gerda, Henrik, Irma, Jakob, Karin"
)
