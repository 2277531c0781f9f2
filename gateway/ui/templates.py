"""The templates. Inserted values are escaped, and their control characters shown as pictures."""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sluice.gateway.ui import formats
from sluice.producer.timeline.durations import seconds

HERE = Path(__file__).parent
STATIC = HERE / "static"
FILTERS = (
    formats.ago,
    formats.clock,
    formats.compact,
    formats.count,
    formats.moment,
    formats.money,
    formats.percent,
    formats.plain,
    seconds,
    formats.sentence,
)


@cache
def environment() -> Environment:
    """Return the templates with their filters."""
    templates = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        finalize=formats.visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Any: filters and globals are of any type; the type checker infers those of jinja2's own.
    cast("dict[str, Any]", templates.filters).update({function.__name__: function for function in FILTERS})
    cast("dict[str, Any]", templates.globals).update(static=static_url)
    return templates


def static_url(name: str) -> str:
    """Return the URL of a static file. It changes with the files, so that browsers may cache them."""
    return f"/ui/static/{name}?v={_stamp()}"


def fragment(name: str, **values: object) -> str:
    """Render a part of a page."""
    return environment().get_template(name).render(**values)


@cache
def _stamp() -> str:
    files = sorted(path for path in STATIC.rglob("*") if path.is_file())
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
