"""Every answer in `docs/guide/history.md` is what its SQL gives, on both databases; the reference lists all columns."""

from sqlalchemy.engine import Engine

from tools import history_pages
from tools.history_examples import PAGE, QUESTIONS, fill, page


def test_when_the_questions_are_asked_then_the_page_has_their_answers(history: Engine) -> None:
    fill(history)
    written = PAGE.read_text(encoding="utf-8")

    assert page(written, history) == written, "run `python -m tools.history_examples` to write the page"
    assert len(QUESTIONS) >= 10


def test_the_reference_describes_each_column_and_each_option_of_the_url() -> None:
    written = history_pages.PAGE.read_text(encoding="utf-8")

    assert history_pages.page(written) == written, "run `python -m tools.history_pages` to write the page"
