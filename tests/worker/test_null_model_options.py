"""The null model's name and its options, as `SLUICE_MODEL` gives them."""

import pytest

from engine.chaos import ChaoticExecutor
from engine.null_model import NullModel
from worker.config import load_config
from worker.errors import ConfigError
from worker.serving import load


class TestGivenTheNullModel:
    def test_when_it_has_options_then_they_are_its_own(self) -> None:
        served = load(load_config({"SLUICE_MODEL": "null?step_s=0.5&mean_output_tokens=7"}))

        assert isinstance(served.executor, NullModel)
        assert (served.executor.config.step_s, served.executor.config.mean_output_tokens) == (0.5, 7)

    def test_when_prompts_are_obeyed_then_they_may_ask_for_faults(self) -> None:
        assert isinstance(load(load_config({"SLUICE_MODEL": "null?obey_prompts=1"})).executor, ChaoticExecutor)

    @pytest.mark.parametrize("options", ["speed=9", "step_s=soon"])
    def test_when_an_option_is_wrong_then_it_is_named(self, options: str) -> None:
        with pytest.raises(ConfigError, match=options):
            load(load_config({"SLUICE_MODEL": f"null?{options}"}))
