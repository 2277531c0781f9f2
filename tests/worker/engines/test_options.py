"""Options of an engine's own become flags of its command line."""

import pytest

from sluice.worker.engines.options import flags_of
from sluice.worker.errors import ConfigError


class TestGivenOptions:
    @pytest.mark.parametrize(
        ("option", "flags"),
        [
            ("ranks=2", ["--ranks", "2"]),
            ("max_ranks=2", ["--max-ranks", "2"]),
            ("--max-ranks=2", ["--max-ranks", "2"]),
            ("eager", ["--eager"]),
            ("eager=true", ["--eager"]),
            ("eager=False", ["--no-eager"]),
            ('config={"a": "b=c"}', ["--config", '{"a": "b=c"}']),
            ("name=", ["--name", ""]),
        ],
    )
    def test_when_they_are_translated_then_they_are_flags(self, option: str, flags: list[str]) -> None:
        assert flags_of([option], decided=(), refused={}) == flags

    @pytest.mark.parametrize("option", ["max_len=3", "--max-len=3", "max-len"])
    def test_when_a_setting_of_the_worker_decides_one_then_it_is_refused(self, option: str) -> None:
        with pytest.raises(ConfigError, match=r"SLUICE_ENGINE_OPTION: .*max[_-]len has a setting of the worker's own"):
            flags_of(["ranks=2", option], decided={"max_len"}, refused={})

    @pytest.mark.parametrize("option", ["drafts=3", "--drafts"])
    def test_when_one_would_do_nothing_then_the_error_says_why(self, option: str) -> None:
        with pytest.raises(ConfigError, match=r"SLUICE_ENGINE_OPTION: .*drafts would do nothing: nobody reads them"):
            flags_of([option], decided=(), refused={"drafts": "nobody reads them"})
