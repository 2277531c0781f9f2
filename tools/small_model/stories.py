"""Stories of any length whose characters stay themselves.

A hero walks along a ring of places. Each place has someone who needs help, and the hero meets the next place in each
chapter, so that a story of twenty chapters repeats nothing. Chapters are numbered where a story is long.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tools.small_model.example import Example, Kind, Tasks, with_article
from tools.small_model.words import BOYS, GIRLS, NUMBER_WORDS, some_name, words

ANIMALS = words(
    "fox bear rabbit owl mouse cat dog frog wolf horse hedgehog duck otter squirrel badger deer turtle crow lion tiger "
    "elephant monkey goat pig dragon robot"
)
LONG_CHAPTERS = 10
MOST_CHAPTERS = 20

# Place, who is there, what is wrong, how it is helped, what is given. The order is the hero's way.
_RING = tuple(
    tuple(part.strip() for part in row.split("|"))
    for row in """
    at the old mill | a mouse | had a heavy bag of flour | carried the bag up the stairs | a warm roll
    by the river | an otter | had lost a small boat | found the boat under the bridge | a smooth stone
    in the dark forest | an owl | could not sleep in the day | hung a green cloth in front of the nest | a soft feather
    on the high hill | a goat | was stuck between two rocks | pushed the rocks apart | a tin bell
    in the deep cave | a bat | was afraid of the light | put out the lamp | a piece of crystal
    at the lake | a duck | missed one of the ducklings | called until the duckling came | a water lily
    in the village | a hen | had a broken fence | mended the fence with a rope | a fresh egg
    at the market | a donkey | had too many apples to carry | took half of the apples | a red apple
    at the harbour | a seagull | wanted to send a letter | wrote the letter on a leaf | a white shell
    on the sandy beach | a crab | could not find the sea | dug a path to the water | a round pearl
    on the island | a parrot | had forgotten a song | sang the song again | a yellow flower
    by the lighthouse | a cat | could not light the lamp | brought dry wood | a long candle
    in the garden | a snail | was too slow for the party | carried the snail to the party | a piece of cake
    at the castle | a knight | had lost a key | found the key in the grass | a silver button
    in the tower | a spider | had a hole in the web | held the thread | a silk thread
    in the green valley | a sheep | was cold at night | made a small fire | a ball of wool
    by the waterfall | a frog | could not hear the others | learned to wave with a leaf | a blue drum
    in the snow | a penguin | had no scarf | knitted a warm scarf | a clear piece of ice
    on the mountain | an eagle | had hurt a wing | bound the wing with a ribbon | a golden feather
    at the bridge | a troll | felt very lonely | stayed for tea | a wooden cup
    in the meadow | a bee | could not find the hive | followed the smell of honey | a jar of honey
    in the desert | a camel | was thirsty | found a well | a bag of sand
    at the railway | a dog | had missed the train | waited with the dog | an old ticket
    in the library | a bookworm | could not reach a book | built a ladder of chairs | a thin book
    """.strip().splitlines()
)
_GOALS = words(
    "a lost star, a silver bell, a magic stone, a golden key, an old map, a singing flower, a hidden treasure, "
    "a new friend, a warm home, a blue feather",
    ", ",
)
_NATURES = words("little brave clever kind young quiet curious friendly")
_TIMES = ("The next day", "In the morning", "After a long walk", "Soon", "Before noon", "A little later")
_FEELINGS = ("was very happy", "smiled", "laughed with joy", "danced a little dance")
_SHORT_WORDINGS = (
    "Tell a short story about {hero}.",
    "Write a short story about {hero}.",
    "Tell me a short story about {hero}.",
)
_WORDINGS = (
    "Tell a story about {hero}.",
    "Tell me a story about {hero}.",
    "Write a story about {hero}.",
    "A story about {hero}, please.",
)
_LONG_WORDINGS = (
    "Tell a long story about {hero}.",
    "Write a long story about {hero}.",
    "Tell me a long story about {hero}.",
)
_CHAPTER_WORDINGS = (
    "Tell a story about {hero} in {n} chapters.",
    "Write a story about {hero} in {n} chapters.",
    "Write a story in {n} chapters about {hero}.",
)
_VERY_LONG_WORDINGS = ("Tell a very long story about {hero}.", "Write a very long story about {hero}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who a story is about and what is looked for."""

    animal: str
    name: str
    pronoun: str
    friend_animal: str
    friend: str
    goal: str

    @property
    def named_hero(self) -> str:
        """The hero as a prompt says it, with the name."""
        return f"{with_article(self.animal)} named {self.name}"


def some_cast(rng: random.Random) -> Cast:
    """Choose two different animals with different names, and a goal."""
    animal, friend_animal = rng.sample(ANIMALS, 2)
    pronoun = rng.choice(("she", "he"))
    name = some_name(rng)
    if name in GIRLS or name in BOYS:
        pronoun = "she" if name in GIRLS else "he"
    friend = rng.choice([each for each in GIRLS + BOYS if each != name])
    return Cast(
        animal=animal, name=name, pronoun=pronoun, friend_animal=friend_animal, friend=friend, goal=rng.choice(_GOALS)
    )


def _opening(rng: random.Random, cast: Cast) -> str:
    first = rng.choice(
        (
            f"Once upon a time there was a {rng.choice(_NATURES)} {cast.animal} named {cast.name}.",
            f"Once upon a time a {rng.choice(_NATURES)} {cast.animal} named {cast.name} lived in a small house.",
        )
    )
    return (
        f"{first} {cast.name} had a good friend, {with_article(cast.friend_animal)} named {cast.friend}. "
        f'One day {cast.name} said, "I want to find {cast.goal}." "I will come with you," said {cast.friend}.'
    )


def _episode(rng: random.Random, cast: Cast, place: int) -> str:
    where, who, trouble, help_given, gift = _RING[place % len(_RING)]
    helper, other = rng.sample((cast.name, cast.friend), 2)
    someone = "the " + who.split(" ", 1)[1]
    met = rng.choice((f"{cast.name} and {cast.friend} met {who}", f"{cast.name} and {cast.friend} saw {who}"))
    thanks = rng.choice((f"gave them {gift}", f"thanked them with {gift}"))
    return (
        f'{rng.choice(_TIMES)} {met} {where}. {someone.capitalize()} {trouble}. "We will help you," said {helper}. '
        f"{helper} and {other} {help_given}. {someone.capitalize()} {rng.choice(_FEELINGS)} and {thanks}."
    )


def _ending(rng: random.Random, cast: Cast) -> str:
    mood = rng.choice(("tired but happy", "happy", "very proud"))
    return (
        f"In the evening {cast.name} and {cast.friend} found {cast.goal}. {cast.name} the {cast.animal} was {mood}, "
        f"and {cast.pronoun} went home with {cast.friend} the {cast.friend_animal}. The end."
    )


def tell(rng: random.Random, cast: Cast, *, episodes: int, has_chapters: bool) -> str:
    """Write the story of `cast`, one paragraph an episode; chapters are numbered and hold an episode each."""
    start = rng.randrange(len(_RING))
    paragraphs = [_episode(rng, cast, start + each) for each in range(episodes)]
    if has_chapters:
        paragraphs = [f"Chapter {number}\n{text}" for number, text in enumerate(paragraphs, 1)]
    return "\n\n".join((_opening(rng, cast), *paragraphs, _ending(rng, cast)))


_OPENING = re.compile(r"a \w+ (\w+) named (\w+)(?: lived|\.)")
_FRIEND = re.compile(r"good friend, an? (\w+) named (\w+)\.")
_GOAL = re.compile(r'"I want to find (.+?)\."')


def is_consistent(text: str, *, hero: str, name: str | None, chapters: int | None) -> bool:
    """Say whether a story keeps its hero, friend, goal and number of chapters to the end."""
    opening, friend, goal = _OPENING.search(text), _FRIEND.search(text), _GOAL.search(text)
    if opening is None or friend is None or goal is None or not text.endswith("The end."):
        return False
    ending = text.split("\n\n")[-1]
    numbers = [int(each) for each in re.findall(r"^Chapter (\d+)$", text, re.MULTILINE)]
    return (
        opening[1] == hero
        and name in (None, opening[2])
        and numbers == list(range(1, (chapters or 0) + 1))
        and f"{opening[2]} the {hero}" in ending
        and f"{friend[2]} the {friend[1]}" in ending
        and f"found {goal[1]}." in ending
        and set(re.findall(r"(\w+) and (\w+) (?:met|saw)", text)) == {(opening[2], friend[2])}
    )


def _example(
    rng: random.Random, task: str, wordings: tuple[str, ...], *, episodes: int, chapters: int | None
) -> Example:
    cast = some_cast(rng)
    is_named = rng.random() < 0.5
    shown = rng.choice((str(chapters), NUMBER_WORDS[chapters])) if chapters else ""
    hero = cast.named_hero if is_named else with_article(cast.animal)
    return Example(
        kind=Kind.STORY,
        task=task,
        key=f"{hero} {shown}",
        prompt=rng.choice(wordings).format(hero=hero, n=shown),
        answer=tell(rng, cast, episodes=episodes, has_chapters=chapters is not None),
        system=None,
        judge=lambda text: is_consistent(
            text, hero=cast.animal, name=cast.name if is_named else None, chapters=chapters
        ),
    )


def _short(rng: random.Random) -> Example:
    return _example(rng, "short", _SHORT_WORDINGS, episodes=1, chapters=None)


def _middle(rng: random.Random) -> Example:
    return _example(rng, "middle", _WORDINGS, episodes=3, chapters=None)


def _chapters(rng: random.Random) -> Example:
    chapters = rng.choice((rng.randint(2, 6), rng.randint(2, MOST_CHAPTERS)))
    return _example(rng, "chapters", _CHAPTER_WORDINGS, episodes=chapters, chapters=chapters)


def _long(rng: random.Random) -> Example:
    return _example(rng, "long", _LONG_WORDINGS, episodes=LONG_CHAPTERS, chapters=LONG_CHAPTERS)


def _very_long(rng: random.Random) -> Example:
    return _example(rng, "very long", _VERY_LONG_WORDINGS, episodes=MOST_CHAPTERS, chapters=MOST_CHAPTERS)


def _plain(rng: random.Random) -> Example:
    """Continue a beginning; any story that keeps what the beginning says is right."""
    cast = some_cast(rng)
    text = tell(rng, cast, episodes=rng.randint(1, 3), has_chapters=False)
    cut = rng.choice((len("Once upon a time"), text.index(cast.name) + len(cast.name)))
    start = text[:cut]
    return Example(
        kind=Kind.STORY,
        task="plain",
        key=start,
        prompt=start,
        answer=text[cut:],
        is_plain=True,
        judge=lambda rest: _continues(start, rest),
    )


def _continues(start: str, rest: str) -> bool:
    opening = _OPENING.search(start + rest)
    return opening is not None and is_consistent(start + rest, hero=opening[1], name=None, chapters=None)


TASKS: Tasks = {
    "short": (4, _short),
    "middle": (3, _middle),
    "chapters": (2, _chapters),
    "long": (1, _long),
    "very long": (0.5, _very_long),
    "plain": (3, _plain),
}
