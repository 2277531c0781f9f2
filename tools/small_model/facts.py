"""Questions about a small table of facts, each fact asked in several wordings."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tools.small_model.example import ONE_WORD, Draw, Example, Kind, Tasks, some_system, with_article


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Pairs of words and how one is asked for, given the other."""

    pairs: str
    """`a b` pairs between commas; a word of several parts is joined with underscores."""

    questions: tuple[str, ...]
    """Wordings with `{a}`, or `{an}` for `{a}` with an article."""

    statement: str
    """The answer, with `{a}` or `{an}`, and then ` {b}`."""

    def facts(self) -> list[tuple[str, str]]:
        """Return the pairs."""
        rows = [row.split() for row in self.pairs.split(",")]
        return [(a.replace("_", " "), b.replace("_", " ")) for a, b in rows]

    def swapped(self) -> str:
        """Return the pairs the other way round, in the notation of `pairs`."""
        return ", ".join(" ".join(reversed(row.split())) for row in self.pairs.split(","))


_CAPITALS = Relation(
    pairs=(
        "France Paris, Italy Rome, Germany Berlin, Spain Madrid, England London, Norway Oslo, Austria Vienna, "
        "Egypt Cairo, Japan Tokyo, India New_Delhi, Peru Lima, Greece Athens, Ireland Dublin, Portugal Lisbon, "
        "Poland Warsaw, Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Hungary Budapest, Belgium Brussels, "
        "China Beijing, Russia Moscow, Canada Ottawa, Cuba Havana, Kenya Nairobi, Turkey Ankara, Chile Santiago, "
        "Argentina Buenos_Aires, Brazil Brasilia, Mexico Mexico_City, Australia Canberra, Iceland Reykjavik, "
        "Switzerland Bern, Ukraine Kyiv, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb, "
        "Thailand Bangkok, Vietnam Hanoi, Iran Tehran, Iraq Baghdad, Morocco Rabat, Ghana Accra, Nepal Kathmandu"
    ),
    questions=("What is the capital of {a}?", "Which city is the capital of {a}?", "Tell me the capital of {a}.",
               "Name the capital of {a}.", "What's the capital of {a}?", "Capital of {a}?"),
    statement="The capital of {a} is {b}.",
)  # fmt: skip

RELATIONS: dict[str, Relation] = {
    "capital": _CAPITALS,
    "country": Relation(
        pairs=_CAPITALS.swapped(),
        questions=("{a} is the capital of which country?", "Which country has the capital {a}?",
                   "What country is {a} the capital of?"),
        statement="{a} is the capital of {b}.",
    ),
    "continent": Relation(
        pairs=(
            "France Europe, Italy Europe, Germany Europe, Spain Europe, Norway Europe, Greece Europe, Egypt Africa, "
            "Kenya Africa, Ghana Africa, Morocco Africa, Japan Asia, India Asia, China Asia, Vietnam Asia, Nepal Asia, "
            "Peru South_America, Chile South_America, Brazil South_America, Canada North_America, Mexico North_America"
        ),
        questions=("On which continent is {a}?", "Which continent is {a} on?", "What continent is {a} on?"),
        statement="{a} is in {b}.",
    ),
    "opposite": Relation(
        pairs=(
            "hot cold, cold hot, big small, small big, fast slow, slow fast, up down, down up, left right, right left, "
            "day night, night day, old young, young old, open closed, closed open, happy sad, sad happy, light dark, "
            "dark light, wet dry, dry wet, high low, low high, near far, far near, rich poor, poor rich, hard soft, "
            "soft hard, loud quiet, quiet loud, early late, late early, strong weak, weak strong, full empty, "
            "empty full, good bad, bad good, long short, short long, black white, white black, yes no, no yes, "
            "win lose, lose win, first last, last first, clean dirty, dirty clean, thick thin, thin thick"
        ),
        questions=("What is the opposite of {a}?", "Tell me the opposite of {a}.", "Opposite of {a}?",
                   "Which word is the opposite of {a}?", "What's the opposite of {a}?"),
        statement="The opposite of {a} is {b}.",
    ),
    "colour": Relation(
        pairs=(
            "the_sky blue, grass green, snow white, coal black, blood red, milk white, the_sun yellow, "
            "a_lemon yellow, a_carrot orange, a_tomato red, a_banana yellow, a_frog green, a_crow black, a_swan white, "
            "chocolate brown, a_fox red, an_elephant grey, a_pea green, a_plum purple, a_violet purple, "
            "gold yellow, ink black, "
            "a_cherry red, rain_clouds grey, a_pumpkin orange"
        ),
        questions=("What colour is {a}?", "What color is {a}?", "Which colour is {a}?", "Tell me the colour of {a}."),
        statement="The colour of {a} is {b}.",
    ),
    "sound": Relation(
        pairs=(
            "dog barks, cat meows, cow moos, duck quacks, horse neighs, pig oinks, sheep bleats, wolf howls, "
            "lion roars, frog croaks, owl hoots, snake hisses, bee buzzes, mouse squeaks, crow caws, "
            "bear growls, dove coos"
        ),
        questions=("What does {an} do?", "What sound does {an} make?", "How does {an} sound?"),
        statement="{an} {b}.",
    ),
    "legs": Relation(
        pairs=(
            "dog four, cat four, horse four, cow four, spider eight, bee six, ant six, bird two, duck two, snake no, "
            "fish no, frog four, crab ten, fly six, person two, owl two, fox four, beetle six"
        ),
        questions=("How many legs does {an} have?", "{an} has how many legs?", "How many legs has {an}?"),
        statement="{an} has {b} legs.",
    ),
    "young": Relation(
        pairs=(
            "dog puppy, cat kitten, cow calf, horse foal, sheep lamb, pig piglet, duck duckling, goose gosling, "
            "bear cub, fox cub, frog tadpole, hen chick, deer fawn, goat kid, owl owlet, swan cygnet, kangaroo joey"
        ),
        questions=("What is a young {a} called?", "What do you call a young {a}?", "What is a baby {a} called?"),
        statement="A young {a} is called a {b}.",
    ),
    "home": Relation(
        pairs=(
            "fox a_den, bear a_cave, bird a_nest, bee a_hive, rabbit a_burrow, spider a_web, horse a_stable, "
            "pig a_sty, dog a_kennel, beaver a_lodge, fish the_water, lion the_savannah, camel the_desert, "
            "penguin the_ice, "
            "monkey the_jungle"
        ),
        questions=("Where does {an} live?", "What is the home of {an}?", "Where is {an} at home?"),
        statement="{an} lives in {b}.",
    ),
    "next day": Relation(
        pairs=(
            "Monday Tuesday, Tuesday Wednesday, Wednesday Thursday, Thursday Friday, Friday Saturday, Saturday Sunday, "
            "Sunday Monday"
        ),
        questions=("What day comes after {a}?", "Which day follows {a}?", "What is the day after {a}?",
                   "Which day comes after {a}?"),
        statement="The day after {a} is {b}.",
    ),
    "next month": Relation(
        pairs=(
            "January February, February March, March April, April May, May June, June July, July August, "
            "August September, September October, October November, November December, December January"
        ),
        questions=("What month comes after {a}?", "Which month follows {a}?", "What is the month after {a}?"),
        statement="The month after {a} is {b}.",
    ),
    "plural": Relation(
        pairs=(
            "mouse mice, foot feet, tooth teeth, goose geese, child children, man men, woman women, person people, "
            "fox foxes, leaf leaves, wolf wolves, knife knives, city cities, baby babies, sheep sheep, dog dogs"
        ),
        questions=("What is the plural of {a}?", "Tell me the plural of {a}.", "Plural of {a}?"),
        statement="The plural of {a} is {b}.",
    ),
    "number word": Relation(
        pairs=(
            "0 zero, 1 one, 2 two, 3 three, 4 four, 5 five, 6 six, 7 seven, 8 eight, 9 nine, 10 ten, 11 eleven, "
            "12 twelve, 13 thirteen, 14 fourteen, 15 fifteen, 16 sixteen, 17 seventeen, 18 eighteen, 19 nineteen, "
            "20 twenty"
        ),
        questions=("How do you write {a} in words?", "Write {a} in words.", "What is {a} in words?"),
        statement="{a} in words is {b}.",
    ),
    "made of": Relation(
        pairs=(
            "bread flour, cheese milk, wine grapes, paper wood, butter milk, glass sand, a_candle wax, "
            "chocolate cocoa, a_jumper wool, ice water, jam fruit, a_tyre rubber, a_brick clay, a_coin metal"
        ),
        questions=("What is {a} made of?", "What do you make {a} of?", "Tell me what {a} is made of."),
        statement="{a} is made of {b}.",
    ),
}  # fmt: skip


def _example(rng: random.Random, task: str, relation: Relation) -> Example:
    a, b = rng.choice(relation.facts())
    wording = rng.randrange(len(relation.questions))
    question = _filled(relation.questions[wording], a)
    start, end = _filled(relation.statement, a).split("{b}")
    example = Example(
        kind=Kind.FACT,
        task=task,
        key=f"{wording} {a}",
        prompt=question,
        answer=f"{start}{b}{end}",
        system=some_system(rng),
    )
    form = rng.random()
    if form < 0.15:
        return replace(
            example, key=f"plain {a}", prompt=start.rstrip(), answer=f" {b}{end}", system=None, is_plain=True
        )
    if form < 0.25:
        return replace(example, answer=b.removeprefix("a ").removeprefix("the "), system=ONE_WORD)
    return example


def _filled(wording: str, a: str) -> str:
    """Put a fact's first word into a wording and begin with a capital letter; `{b}` stays."""
    sentence = wording.format(a=a, an=with_article(a), b="{b}")
    return sentence[0].upper() + sentence[1:]


def _task(name: str, relation: Relation) -> tuple[float, Draw]:
    return len(relation.facts()) ** 0.5, lambda rng: _example(rng, name, relation)


TASKS: Tasks = {name: _task(name, relation) for name, relation in RELATIONS.items()}
