"""Names and words that several kinds of the corpus share."""

from __future__ import annotations

import random


def words(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Return the parts of `text` between separators, by default its words."""
    return tuple(text.split(separator))


GIRLS = words(
    "Ada Mia Lena Rosa Nora Ella Ivy Lucy Clara Emma Hana Zoe Maya Ruth Alma Greta Olga Tina Vera Wilma "
    "Anna Bella Dora Eva Flora Gina Iris Julia Kira Luna"
)
BOYS = words(
    "Tom Max Ben Leo Finn Paul Otto Hugo Noah Oscar Sam Karl Emil Jack Felix Theo Ivan Omar Yuri Ravi "
    "Adam Bruno Carl David Erik Fred Gus Henry Igor Jonas"
)
NAMES = GIRLS + BOYS

_SYLLABLES = words(
    "ba be bo da de do fa fi ga go ka ki la le lo ma mi mo na ne no pa pi ra ri ro sa se so ta te to va vi za zo"
)

CITIES = words(
    "Paris Rome Berlin Madrid London Oslo Vienna Cairo Tokyo Delhi Lima Prague Athens Dublin Lisbon Warsaw "
    "Boston Chicago Munich Milan Toronto Sydney"
)

LISTS: dict[str, tuple[str, ...]] = {
    "fruits": words("apple pear plum cherry grape banana orange lemon peach mango"),
    "animals": words("fox bear rabbit owl mouse cat dog frog wolf horse"),
    "colours": words("red blue green yellow black white brown pink purple orange"),
    "vegetables": words("carrot potato onion tomato bean pea cabbage pepper spinach leek"),
    "birds": words("owl crow duck swan eagle robin hawk goose dove stork"),
    "trees": words("oak pine birch maple willow beech cedar elm ash fir"),
    "cities": words("Paris Rome Berlin Madrid London Oslo Vienna Cairo Tokyo Lima"),
    "countries": words("France Italy Germany Spain Norway Egypt Japan Peru India Greece"),
    "flowers": words("rose tulip lily daisy violet poppy iris orchid lotus aster"),
    "tools": words("hammer saw drill file axe rake spade knife brush ladder"),
    "drinks": words("water milk tea coffee juice cocoa lemonade soda broth cider"),
    "rivers": words("Nile Rhine Danube Amazon Thames Seine Volga Ganges Congo Elbe"),
}

NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)

THINGS = words("apples pears books coins stones cards balls shells eggs pens nuts keys")


def some_name(rng: random.Random) -> str:
    """Choose a name: mostly a known one, sometimes one that is made up."""
    if rng.random() < 0.75:
        return rng.choice(NAMES)
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def some_names(rng: random.Random, count: int) -> list[str]:
    """Choose `count` different names."""
    names: list[str] = []
    while len(names) < count:
        name = some_name(rng)
        if name not in names:
            names.append(name)
    return names
