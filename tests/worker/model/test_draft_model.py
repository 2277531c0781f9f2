"""A draft model of a worker: what it must share with the model, what it may take, and that it changes no token."""

import json
import shutil
from pathlib import Path

import pytest

from sluice.engine.request import Request, Sampling
from sluice.worker.config import load_config
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import load, prepare
from sluice.worker.model.loaded_model import LocalModel

OPTIONS = {"DTYPE": "float32", "MAX_MODEL_LEN": "256", "NUM_BLOCKS": "64", "MAX_NUM_SEQS": "4"}


def settings(**given: str) -> dict[str, str]:
    return {f"SLUICE_{name}": value for name, value in (OPTIONS | given).items()}


def small_model_with(folder: Path, **changes: object) -> Path:
    """The small model, with other fields in its tokenizer's vocabulary."""
    shutil.copytree(SMALL_MODEL, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"] |= changes
    path.write_text(json.dumps(tokenizer))
    return folder


def generated(model: LocalModel) -> list[tuple[int, ...]]:
    """Greedy and sampled outputs of four prompts at once."""
    engine = model.engine
    engine.add(
        Request(
            id=str(number),
            prompt_token_ids=tuple(model.encode(f"The river number {number} flows", add_special_tokens=True)),
            sampling=Sampling(temperature=number / 2, seed=number, max_tokens=24, ignore_eos=True),
        )
        for number in range(4)
    )
    found: dict[str, tuple[int, ...]] = {}
    while not engine.is_idle:
        for delta in engine.advance():
            found[delta.request_id] = found.get(delta.request_id, ()) + tuple(delta.token_ids)
    return [found[str(number)] for number in range(4)]


class TestGivenADraftModelWithTheSameTokenizer:
    """The small model itself."""

    def test_when_a_worker_has_it_then_tokens_and_fingerprint_are_the_same(self) -> None:
        with_it = load(load_config(settings(DRAFT_MODEL=str(SMALL_MODEL))))
        without = load(load_config(settings(SPECULATION="off")))

        assert generated(with_it) == generated(without)
        assert with_it.executor.fingerprint == without.executor.fingerprint
        assert with_it.engine.stats.num_drafted_tokens > 0
        assert without.engine.stats.num_drafted_tokens == 0

    def test_when_the_memory_of_its_cache_holds_no_block_then_the_setting_is_named(self) -> None:
        config = load_config(settings(DRAFT_MODEL=str(SMALL_MODEL), DRAFT_CACHE_MIB="1", BLOCK_SIZE="2048"))

        with pytest.raises(ConfigError, match="SLUICE_DRAFT_CACHE_MIB: 1 MiB cannot hold a block of 2048 tokens"):
            prepare(config)


class TestGivenAnotherTokenizer:
    def test_when_a_token_differs_then_it_is_named(self, tmp_path: Path) -> None:
        vocab: dict[str, int] = json.loads((SMALL_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
        names = {number: token for token, number in vocab.items()}
        one, other = names[700], names[701]
        folder = small_model_with(tmp_path / "other", vocab=vocab | {one: 701, other: 700})

        with pytest.raises(
            ConfigError, match=r"SLUICE_DRAFT_MODEL: .* has a different tokenizer from the model"
        ) as caught:
            prepare(load_config(settings(DRAFT_MODEL=str(folder))))

        assert f"token 700 is {other!r}, not {one!r}" in str(caught.value)


class TestGivenSettingsThatContradictADraftModel:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"SPECULATION": "off"}, "SLUICE_DRAFT_MODEL: speculation is off"),
            ({"DRAFT_CACHE_MIB": "0"}, "SLUICE_DRAFT_CACHE_MIB"),
            ({"MODEL": "null"}, "SLUICE_DRAFT_MODEL: the null model has no tokenizer"),
            ({"DISCIPLINE": "orca"}, "speculation must be off with the discipline orca"),
            ({"DRAFT_MODEL": "/nowhere"}, "SLUICE_DRAFT_MODEL: /nowhere is not a folder"),
        ],
        ids=str,
    )
    def test_when_the_model_is_prepared_then_they_are_named(self, given: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            prepare(load_config(settings(**({"DRAFT_MODEL": str(SMALL_MODEL)} | given))))
