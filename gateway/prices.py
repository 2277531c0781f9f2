"""What the price of a model may be: for the page and the command line. Knows no database."""

import re
from collections.abc import Mapping

from sluice.protocol.limits import MAX_MODEL_CHARS

MAX_PRICE = 1e6
"""Of a million tokens."""

_CURRENCY = re.compile(r"[A-Z]{3}")


def price_problem(model: str, currency: str, amounts: Mapping[str, float]) -> str | None:
    """Return why a model cannot have a price; None if it can.

    Args:
        model: Its name.
        currency: Its code.
        amounts: For a million tokens, by their kind.
    """
    if not 0 < len(model) <= MAX_MODEL_CHARS or "\0" in model:
        return f"the name of a model has 1 to {MAX_MODEL_CHARS} characters"
    if not _CURRENCY.fullmatch(currency):
        return f"a currency has three capital letters, such as USD or EUR; got {currency[:20]!r}"
    wrong = (name for name, amount in amounts.items() if not 0 <= amount <= MAX_PRICE)
    return next((f"the price of {name} tokens must be a number from 0 to {MAX_PRICE:,.0f}" for name in wrong), None)
