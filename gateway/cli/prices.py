"""The commands `producer prices …`: prices of tokens, by model."""

import click

from sluice.gateway.prices import MAX_PRICE, price_problem
from sluice.producer import config
from sluice.producer.cli.common import database_option, json_option, note, show_json, show_table, when
from sluice.producer.errors import InvalidSetting
from sluice.protocol.clock import wall_ms
from sluice.protocol.host.numbers import Number

AMOUNT = Number(0, MAX_PRICE)
HEADERS = ("model", "input", "cached", "output", "currency", "since")


@click.group()
def prices() -> None:
    """Set and list the prices of models, from which the page and the history's views compute costs."""


@prices.command("set")
@click.argument("model")
@click.option("--input", "per_input", metavar="AMOUNT", type=AMOUNT, required=True,
              help="Price of a million prompt tokens.")  # fmt: skip
@click.option("--cached", "per_cached", metavar="AMOUNT", type=AMOUNT,
              help="Price of a million prompt tokens from the prefix cache. Default: that of --input.")  # fmt: skip
@click.option("--output", "per_output", metavar="AMOUNT", type=AMOUNT, required=True,
              help="Price of a million output tokens.")  # fmt: skip
@click.option("--currency", metavar="CODE", default="USD", show_default=True, help="Three letters, such as EUR.")
@database_option
def set_one(
    *,
    model: str,
    per_input: float,
    per_cached: float | None,
    per_output: float,
    currency: str,
    database_url: str | None,
) -> None:
    """Set the price of a model, for jobs that are submitted from now on.

    \b
    Example:
        producer prices set small_model --input 0.5 --cached 0.1 --output 1.5
    """
    from sluice.gateway.tables.database import Database
    from sluice.gateway.ui.read.usage import Price, set_price

    per_cached = per_input if per_cached is None else per_cached
    amounts = {"input": per_input, "cached": per_cached, "output": per_output}
    if problem := price_problem(model, currency, amounts):
        raise InvalidSetting(problem)
    price = Price(model=model, since_ms=wall_ms(), currency=currency, **amounts)
    with Database(config.database_url(database_url)) as database:
        set_price(database, price)
    note(f"the price of {model} is set; it applies to jobs submitted from now on")


@prices.command("list")
@json_option
@database_option
def list_all(*, as_json: bool, database_url: str | None) -> None:
    """List the current prices of a million tokens.

    \b
    Example:
        producer prices list
    """
    from sluice.gateway.tables.database import Database
    from sluice.gateway.ui.read.usage import prices_now

    with Database(config.database_url(database_url)) as database:
        current = prices_now(database)
    if as_json:
        show_json(current)
    else:
        rows = [(row.model, row.input, row.cached, row.output, row.currency, when(row.since_ms)) for row in current]
        show_table(HEADERS, rows)
