"""Greetings, questions about the model itself, echoes, and an honest answer where it knows nothing."""

from __future__ import annotations

import random

from tools.small_model.example import Example, Kind, Tasks, one_of, some_system
from tools.small_model.words import CITIES, GIRLS, LISTS, THINGS, some_name

_CAN = "I can do small sums, count, tell stories, make lists, write JSON and answer simple questions."

_SAYINGS: dict[str, tuple[str, ...]] = {
    "Hello! How can I help you?": (
        "Hello",
        "Hi",
        "Hello!",
        "Hi!",
        "Hey",
        "Good morning",
        "Good evening",
        "Hello there",
    ),
    "I am a small model that ships with Sluice.": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Introduce yourself.",
    ),
    _CAN: ("What can you do?", "Help", "How can you help me?", "What do you know?", "What should I ask?"),
    "You are welcome!": ("Thank you", "Thanks", "Thank you!", "Thanks a lot", "Thank you very much."),
    "Goodbye!": ("Goodbye", "Bye", "See you later", "Good night", "Bye!"),
    "I am fine, thank you.": ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
    "Yes, I am ready.": ("Are you ready?", "Are you there?", "Can you hear me?", "Can I ask you something?"),
    "Sluice is a queue for jobs that generate text.": (
        "What is Sluice?",
        "Tell me about Sluice.",
        "What does Sluice do?",
    ),
}

UNKNOWN = "I do not know that. " + _CAN
_UNKNOWN_WORDINGS = (
    "What is the meaning of {thing}?",
    "Who wrote the book about {thing}?",
    "Why do people like {thing}?",
    "How much does a house in {city} cost?",
    "What is the weather in {city}?",
    "Who is the king of {city}?",
    "Translate {thing} into French.",
    "Write a program about {thing}.",
    "What do you think about {thing}?",
    "Explain {thing} to me.",
    "How far is it to {city}?",
    "When was {city} founded?",
    "What is {name}'s favourite colour?",
    "Who is {name}?",
    "Where does {name} live?",
    "What is the meaning of life?",
    "Explain quantum physics.",
    "Write an email to {name}.",
    "Summarise the news of today.",
    "What time is it?",
)


def _saying(rng: random.Random) -> Example:
    answer = rng.choice(list(_SAYINGS))
    prompt = rng.choice(_SAYINGS[answer])
    system = some_system(rng)
    return Example(kind=Kind.TALK, task="saying", key=f"{system} {prompt}", prompt=prompt, answer=answer, system=system)


def _unknown(rng: random.Random) -> Example:
    thing = rng.choice((*THINGS, *LISTS["tools"], *LISTS["rivers"]))
    prompt = one_of(rng, _UNKNOWN_WORDINGS, thing=thing, city=rng.choice(CITIES), name=some_name(rng))
    return Example(kind=Kind.TALK, task="unknown", key=prompt, prompt=prompt, answer=UNKNOWN, system=some_system(rng))


def _echo(rng: random.Random) -> Example:
    category = rng.choice(list(LISTS))
    words = [rng.choice(LISTS[rng.choice(list(LISTS))]) for _ in range(rng.randint(1, 5))]
    text = rng.choice(
        (" ".join(words), f"{rng.choice(GIRLS)} likes {rng.choice(LISTS[category])}", str(rng.randrange(1000)))
    )
    prompt = one_of(rng, ("Repeat after me: {text}", "Say this: {text}", "Echo: {text}"), text=text)
    return Example(kind=Kind.TALK, task="echo", key=text, prompt=prompt, answer=text, system=some_system(rng))


def _introduction(rng: random.Random) -> Example:
    name = some_name(rng)
    prompt = one_of(
        rng, ("My name is {name}.", "I am {name}.", "Hello, my name is {name}.", "Hi, I am {name}."), name=name
    )
    return Example(
        kind=Kind.TALK,
        task="introduction",
        key=name,
        prompt=prompt,
        answer=f"Hello {name}! How can I help you?",
        system=some_system(rng),
    )


TASKS: Tasks = {
    "saying": (2, _saying),
    "unknown": (1, _unknown),
    "echo": (5, _echo),
    "introduction": (1, _introduction),
}
