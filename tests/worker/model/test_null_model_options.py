"""The null model's name and its options, as `SLUICE_MODEL` gives them."""

import pytest

from sluice.engine.null_model import NullModel
from sluice.engine.request import Request
from sluice.engine.testing.fault_injection import ChaoticExecutor
from sluice.worker.config import load_config
from sluice.worker.errors import ConfigError
from sluice.worker.model.load import load


class TestGivenTheNullModel:
    def test_when_it_has_options_then_they_are_its_own(self) -> None:
        served = load(load_config({"SLUICE_MODEL": "null?step_s=0.5&mean_output_tokens=7"}))

        assert isinstance(served.executor, NullModel)
        assert (served.executor.config.step_s, served.executor.config.mean_output_tokens) == (0.5, 7)

    def test_when_prompts_are_obeyed_then_they_may_ask_for_faults(self) -> None:
        assert isinstance(load(load_config({"SLUICE_MODEL": "null?obey_prompts=1"})).executor, ChaoticExecutor)

    def test_when_a_discipline_is_named_then_the_engine_batches_so(self) -> None:
        engine = load(
            load_config({"SLUICE_MODEL": "null", "SLUICE_DISCIPLINE": "dynamic", "SLUICE_BATCH_WINDOW_S": "60"})
        ).engine
        engine.add([Request(id="first", prompt_token_ids=(1, 2))])

        # Its batch is not full: it waits for others.
        assert 0 < engine.idle_s <= 60
        assert engine.advance() == []

    def test_when_the_discipline_is_unknown_then_the_names_are_listed(self) -> None:
        with pytest.raises(ConfigError, match=r"discipline must be one of continuous, .* got 'luck'"):
            load(load_config({"SLUICE_MODEL": "null", "SLUICE_DISCIPLINE": "luck"}))

    def test_when_it_shall_be_quantised_then_that_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_QUANTIZATION: the null model has no weights"):
            load(load_config({"SLUICE_MODEL": "null", "SLUICE_QUANTIZATION": "int8"}))

    def test_when_its_cache_shall_be_in_fp8_then_that_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="SLUICE_KV_CACHE_DTYPE: the null model has no keys"):
            load(load_config({"SLUICE_MODEL": "null", "SLUICE_DEVICE": "cuda:0", "SLUICE_KV_CACHE_DTYPE": "fp8"}))

    @pytest.mark.parametrize("options", ["speed=9", "step_s=soon"])
    def test_when_an_option_is_wrong_then_it_is_named(self, options: str) -> None:
        with pytest.raises(ConfigError, match=options):
            load(load_config({"SLUICE_MODEL": f"null?{options}"}))
