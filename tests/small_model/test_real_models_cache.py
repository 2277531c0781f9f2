"""Where `tools.real_model` keeps its folders."""

from pathlib import Path

import pytest

from tools.real_model.folder import models_folder, real_model_folder


class TestGivenACacheFolder:
    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"REAL_MODELS_DIR": "/a/models", "XDG_CACHE_HOME": "/x"}, "/a/models"),
            ({"REAL_MODELS_DIR": "", "XDG_CACHE_HOME": "/x"}, "/x/sluice/models"),
            ({"REAL_MODELS_DIR": "", "XDG_CACHE_HOME": ""}, "~/.cache/sluice/models"),
        ],
        ids=["named", "XDG", "neither"],
    )
    def test_when_it_is_looked_up_then_the_nearest_name_wins(
        self, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str
    ) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

        assert models_folder() == Path(expected).expanduser()

    @pytest.mark.parametrize(("dtype", "name"), [("float32", ""), ("bfloat16", "-bfloat16")])
    def test_when_a_model_is_there_then_nothing_is_made(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, name: str
    ) -> None:
        monkeypatch.setenv("REAL_MODELS_DIR", str(tmp_path))
        folder = tmp_path / f"SmolLM2-135M-Instruct{name}"
        folder.mkdir()
        (folder / "config.json").touch()

        found = real_model_folder("smollm2", "float32" if dtype == "float32" else "bfloat16")

        assert found == folder
