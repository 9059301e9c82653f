"""`data.source: constraints`: a topic and a constraint, which a regular expression verifies; no responses.

Column `rule` is the expression for the whole stripped response; `about` and `form` are its two halves, for
partial credit. `kind` names the constraint, and `seen` says whether train prompts have its kind. The kinds
UNSEEN are in the test split only. Every topic is in one split.

A rule also needs at least LEAST_WORDS words and the name of the topic, in any case, so that a response which
only has the right form fails. The kinds are after IFEval (arXiv 2311.07911).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlhf_tasks.config import Split
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.errors import UserError

COLUMNS = ("rule", "about", "form", "kind", "seen", "topic")
LEAST_WORDS = 10
Row = dict[str, Any]

WORDS = ("because", "people", "important", "small", "often", "time", "world", "always")
STARTS = ("Today", "Imagine", "Indeed", "Well", "Honestly", "Once", "Think", "Sometimes")
ENDS = (
    "That is all.",
    "I hope this helps.",
    "Ask me for more.",
    "Now you know.",
    "Is there anything else?",
    "Thank you for reading.",
)


class Kind(NamedTuple):
    """A constraint in words, with {argument}, and the arguments that it may have."""

    words: str
    rule: Callable[[Any], str]
    """The expression that the whole response matches; `.` matches line breaks."""
    arguments: Sequence[Any] = ("",)


def _bullets(count: int) -> str:
    """Exactly `count` lines that begin with * or -, among any other lines."""
    bullet, other = r"[ \t]*[*-] [^\n]*(?:\n|\Z)", r"(?:(?![ \t]*[*-] )[^\n]*\n)*"
    return rf"(?:{other}{bullet}){{{count}}}{other}(?![ \t]*[*-] )[^\n]*"


SEEN: Mapping[str, Kind] = {
    "quotes": Kind("Put your whole answer in double quotation marks.", lambda _: '"[^"]*"'),
    "lowercase": Kind("Use only lowercase letters.", lambda _: "[^A-Z]*"),
    "begins": Kind('Begin your answer with the word "{argument}".', lambda word: rf"{word}\b.*", STARTS),
    "ends": Kind(
        'End your answer with the exact sentence "{argument}"', lambda end: f".*{re.escape(end)}", ENDS
    ),
    "keyword": Kind(
        'Use the word "{argument}" at least twice.', lambda word: rf"(?i:.*\b{word}\b.*\b{word}\b.*)", WORDS
    ),
    "title": Kind("Give your answer a title in <<double angle brackets>>.", lambda _: r".*<<[^<>\n]+>>.*"),
    "postscript": Kind('Add a postscript at the end that starts with "P.S."', lambda _: r".*\sP\.S\..*\w.*"),
    "bullets": Kind("Answer with exactly {argument} bullet points.", _bullets, (2, 3, 4)),
    "sentences": Kind(
        "Answer with exactly {argument} sentences.", lambda n: rf"(?:[^.!?]+[.!?]+){{{n}}}[\"')*]*", (2, 3)
    ),
    "at_most": Kind(
        "Use at most {argument} words.", lambda most: rf"\S+(?:\s+\S+){{0,{most - 1}}}", (15, 20, 25)
    ),
}
UNSEEN: Mapping[str, Kind] = {
    "capitals": Kind("Use only capital letters.", lambda _: "[^a-z]*"),
    "highlights": Kind("Highlight two phrases with *asterisks*.", lambda _: r"(?:.*?\*[^*\n]+\*){2}.*"),
    "placeholder": Kind(
        "Include a placeholder in square brackets, such as [name].", lambda _: r".*\[[^\[\]]+\].*"
    ),
    "no_commas": Kind("Do not use any commas.", lambda _: "[^,]*"),
}
OPENERS = (
    "Describe {} in a few words.",
    "Tell me about {} in a few words.",
    "Explain {} in a few words.",
    "Write about {} in a few words.",
)


def about(topic: str) -> str:
    """The start of an expression that needs the topic's name and LEAST_WORDS words."""
    name = re.escape(topic.removesuffix("s"))  # the singular names it too
    return rf"(?=\S+(?:\s+\S+){{{LEAST_WORDS - 1}}})(?=(?i:.*\b{name}))"


def generate(
    seed: int,
    *,
    num_prompts: int,
    num_validation: int,
    num_test: int,
    keep: Sequence[str] = (),
) -> dict[Literal["prompts"], dict[Split, list[Row]]]:
    """Plain prompts by split.

    Held-out splits have as few topics as their numbers of rows allow, each with every kind; train prompts
    have all other topics.

    Raises:
        UserError: if there are not as many.
    """
    rng = random.Random(f"constraints-{seed}")
    topics = list(TOPICS)
    rng.shuffle(topics)
    kinds: dict[Split, dict[str, Kind]] = {"test": {**SEEN, **UNSEEN}, "validation": {**SEEN}}
    parts: dict[Split, list[Row]] = {"train": []}
    heldout: dict[Split, int] = {"test": num_test, "validation": num_validation}
    for split, count in heldout.items():
        needed = -(-count // len(kinds[split]))
        parts[split] = _rows(rng, topics[:needed], kinds[split])[:count]
        topics = topics[needed:]
    train = _rows(rng, topics, SEEN)
    if num_prompts > len(train):
        raise UserError(
            f"prepare.synthetic_prompt_rows={num_prompts}, and with data.num_validation={num_validation} and "
            f"data.num_test={num_test} there are {len(train)} different train prompts; lower one of them"
        )
    rng.shuffle(train)
    parts["train"] = train[:num_prompts]
    made = {s: [prompt(row, keep, "constraints") for row in rows] for s, rows in parts.items()}
    return {"prompts": made}


def _rows(rng: random.Random, topics: Sequence[str], kinds: Mapping[str, Kind]) -> list[Row]:
    """The text and the COLUMNS of every topic with every kind."""
    rows = []
    for topic in topics:
        for name, kind in kinds.items():
            argument = rng.choice(kind.arguments)
            text = f"{rng.choice(OPENERS).format(topic)} {kind.words.format(argument=argument)}"
            seen = "yes" if name in SEEN else "no"
            start, form = about(topic), kind.rule(argument)
            values = (text, start + form, f"{start}.*", form, name, seen, topic)
            rows.append(dict(zip(("text", *COLUMNS), values, strict=True)))
    return rows


def prompt(row: Row, keep: Sequence[str], source: str) -> Row:
    """A prompt's row without a reference, of a `text` and the columns to keep."""
    kept = {KEY: {name: row[name] for name in keep}} if keep else {}
    return {"prompt": row["text"], "reference": None, "source": source} | kept


TOPICS = re.split(
    r",\s+",
    """
airplanes, airports, algebra, almonds, ambulances, anchors, ants, apples, apricots, aquariums, archery,
astronomy, athletics, autumn, avocados, backpacks, badgers, bagels, bakers, ballet, balloons, bamboo,
bananas, banks, barley, basil, baskets, basketball, bats, beans, bears, beavers, bees, beetles, bells,
bicycles, birds, biscuits, blankets, blood, boats, bones, books, boots, bottles, bread, breakfast, bricks,
bridges, brooms, bumblebees, butter, buttons, cabbage, cables, cakes, calendars, camels, cameras, camping,
candles, canoes, canyons, caravans, carpets, carrots, cars, castles, caterpillars, cats, caves, cellos,
cement, chairs, chalk, cheese, cheetahs, chemistry, chess, chestnuts, chickens, chimneys, chocolate, choirs,
cinemas, cinnamon, clarinets, clay, cliffs, clocks, clouds, clover, coal, coasts, cobwebs, coconuts, coffee,
coins, colors, comets, computers, concerts, concrete, cooking, copper, coral, corn, cotton, cows, crabs,
cranes, crayons, crickets, crocodiles, crows, crystals, cucumbers, curtains, cushions, cycling, dams,
dancing, deer, dentists, deserts, diamonds, dinosaurs, diving, doctors, dogs, dolls, dolphins, donkeys,
doors, dragons, drawing, dreams, drums, ducks, dust, eagles, ears, earthquakes, earthworms, eclipses, eels,
eggs, electricity, elephants, elevators, emeralds, engines, envelopes, erosion, falcons, farming, feathers,
fences, ferns, figs, fireworks, fish, flags, flamingos, flour, flowers, flutes, fog, folk songs, football,
forests, fossils, fountains, frogs, frost, furniture, gardens, garlic, geometry, geysers, ghosts, ginger,
giraffes, glaciers, glass, gloves, glue, goats, gold, golf, gorillas, grammar, granite, grapes, grass,
gravity, guitars, hail, hammers, hamsters, handwriting, harbors, harps, hats, hawks, hay, hedgehogs,
helicopters, helmets, herbs, herons, hiking, hills, honey, horses, hospitals, hotels, hurricanes, ice,
icebergs, igloos, ink, insects, iron, islands, ivory, jackets, jam, jazz, jellyfish, jewelry, juggling,
jungles, kangaroos, kayaks, kettles, keys, kites, kitchens, kittens, knots, ladders, ladybugs, lakes, lamps,
languages, lanterns, lasers, laundry, lava, lavender, lawns, leather, lemons, lentils, leopards, letters,
lettuce, lichen, lighthouses, lightning, lions, lizards, lobsters, locks, locomotives, luggage, lunch,
magnets, mail, mammoths, mangroves, maple syrup, maps, marathons, marble, markets, masks, meadows, medicine,
melons, mercury, meteors, metals, microscopes, milk, mills, mining, mint, mirrors, monkeys, moonlight,
mosaics, moss, moths, motors, mountains, mud, muscles, museums, mushrooms, music, mustard, needles, nests,
newspapers, night, noise, noodles, novels, nurses, nuts, oak trees, oats, oceans, oil, olives, onions,
opera, oranges, orchards, orchestras, orchids, origami, otters, ovens, owls, oxygen, oysters, paint,
palaces, pancakes, pandas, paper, parachutes, parks, parrots, pasta, peacocks, peanuts, pearls, pears,
pebbles, pelicans, pencils, penguins, pepper, perfume, pianos, pickles, pigeons, pigs, pillows, pine cones,
pirates, pizza, planets, plastic, plows, plums, poetry, polar bears, ponds, popcorn, postcards, pottery,
printing, pumpkins, puppets, puzzles, pyramids, quartz, quilts, rabbits, raccoons, railways, rain, rainbows,
raisins, recipes, reindeer, rice, rings, rivers, roads, robins, robots, rockets, roofs, ropes, roses,
rowing, rubber, rugby, running, rust, saddles, sailing, salad, salmon, salt, sand, sandals, satellites,
scarecrows, schools, scissors, sculptures, seals, seashells, seeds, shadows, sharks, sheep, ships, shoes,
silence, silk, silver, singing, skating, skiing, sleep, sloths, smoke, snails, snakes, snow, soap, soccer,
socks, soil, soup, spiders, spinach, sponges, spoons, squirrels, stars, statues, steam, steel, storms,
sugar, suitcases, summer, sunflowers, sunlight, surfing, swans, swimming, swords, tables, tailors, taxis,
tea, teachers, telescopes, tennis, tents, theaters, thunder, tides, tigers, tiles, toasters, tortoises,
towels, towers, toys, tractors, trains, trees, trumpets, tulips, tunnels, turtles, umbrellas, uniforms,
vanilla, vases, velvet, vinegar, violins, vultures, waffles, walking, walnuts, warehouses, wasps, water,
waterfalls, waves, weaving, whales, wheat, wheels, whistles, wind, windmills, windows, winter, woodpeckers,
wool, writing, yachts, yoga, yogurt, zebras""".strip(),
)
