"""How vectors are made, by the files that sentence-transformers writes into a model's folder."""

import json
from pathlib import Path

import pytest

from sluice.engine.errors import ModelFolderError
from sluice.engine.request import Embed
from sluice.worker.model.pooling import read_pooling

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.pooling."


def write(folder: Path, *kinds: str, **pooling: object) -> Path:
    """Write the modules of these types, the second of which is the pooling."""
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"idx": at, "name": str(at), "path": paths[at], "type": kind} for at, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
    return folder


class TestGivenAFolderOfSentenceTransformers:
    @pytest.mark.parametrize(
        ("pooling", "expected"),
        [
            ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
            ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
            ({"pooling_mode": "lasttoken"}, "last"),
            ({"pooling_mode": "mean"}, "mean"),
            ({}, "mean"),
        ],
    )
    def test_when_its_pooling_is_read_then_it_is_that(
        self, pooling: dict[str, object], expected: str, tmp_path: Path
    ) -> None:
        folder = write(tmp_path, f"{OLD}Transformer", f"{NEW}Pooling", f"{OLD}Normalize", **pooling)

        found = read_pooling(folder, None)

        assert isinstance(found, Embed)
        assert (found.pooling, found.is_normalised) == (expected, True)

    def test_when_it_does_not_normalise_then_neither_do_we(self, tmp_path: Path) -> None:
        folder = write(tmp_path, f"{OLD}Transformer", f"{OLD}Pooling", pooling_mode="mean")

        assert read_pooling(folder, None) == Embed(pooling="mean", is_normalised=False)
        assert read_pooling(folder, "last") == Embed(pooling="last", is_normalised=False)

    @pytest.mark.parametrize("pooling", [{"pooling_mode_cls_token": True}, {"pooling_mode": ["mean", "max"]}])
    def test_when_its_pooling_is_another_then_the_sentence_says_which(
        self, pooling: dict[str, object], tmp_path: Path
    ) -> None:
        folder = write(tmp_path, f"{OLD}Transformer", f"{OLD}Pooling", **pooling)

        found = read_pooling(folder, None)

        assert isinstance(found, str)
        assert "pooled by" in found

    def test_when_it_has_a_dense_layer_then_no_setting_helps(self, tmp_path: Path) -> None:
        folder = write(tmp_path, f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Dense", pooling_mode="mean")

        assert "Dense" in str(read_pooling(folder, None))
        assert isinstance(read_pooling(folder, "mean"), str)

    def test_when_a_file_is_damaged_then_the_error_names_it(self, tmp_path: Path) -> None:
        (tmp_path / "modules.json").write_text("{")

        with pytest.raises(ModelFolderError, match=r"modules\.json"):
            read_pooling(tmp_path, None)


class TestGivenAnyOtherFolder:
    def test_when_nothing_is_stated_then_it_is_the_last_token_scaled(self, tmp_path: Path) -> None:
        assert read_pooling(tmp_path, None) == Embed(pooling="last", is_normalised=True)
