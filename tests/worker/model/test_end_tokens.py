"""The tokens that end an answer, whichever part of a model folder names them."""

import json
import shutil
from pathlib import Path

import pytest

from sluice.engine.request import FinishReason, Request, SamplingParams
from sluice.producer.contract.wire import Message
from sluice.worker.config import load_config
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import load
from sluice.worker.model.loaded_model import LocalModel

END, PAD = "<|end|>", "<|pad|>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose configs and tokenizer name the end of another model. Its chat template ends answers as trained."""
    folder = tmp_path / "model"
    shutil.copytree(SMALL_MODEL, folder)
    pad_id = json.loads((folder / "config.json").read_text())["pad_token_id"]
    for name in ("config.json", "generation_config.json"):
        rewrite(folder / name, eos_token_id=pad_id)
    rewrite(folder / "tokenizer_config.json", eos_token=PAD)
    return folder


def rewrite(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def loaded(folder: Path) -> LocalModel:
    return load(load_config({"SLUICE_MODEL": str(folder)}))


def answer_of(model: LocalModel) -> FinishReason:
    """Why the answer to a question ended."""
    assert model.text.template is not None
    prompt = model.text.template.render((Message(role="user", content="What is 2 + 2?"),), now_ms=0)
    token_ids = tuple(model.encode(prompt, add_special_tokens=False))
    sampling = SamplingParams(temperature=0, max_tokens=60)
    model.engine.add([Request(id="r", prompt_token_ids=token_ids, sampling=sampling)])
    ends = [delta.finish for _ in range(60) for delta in model.engine.advance() if delta.finish is not None]
    return ends[0].reason


class TestGivenAFineTuneWhoseConfigsNameTheBaseModelsEnd:
    """Its answers end with its chat template's token."""

    def test_when_it_has_answered_then_the_answer_ends(self, folder: Path) -> None:
        assert answer_of(loaded(folder)) is FinishReason.STOP

    def test_when_it_is_loaded_then_each_end_is_named_with_its_sources(self, folder: Path) -> None:
        ends = loaded(folder).text.end_tokens

        assert [END in line and "chat template" in line for line in ends] == [False, True]
        assert PAD in ends[0]
        assert "generation_config.json, tokenizer" in ends[0]


class TestGivenATemplateThatEndsAnswersWithNoToken:
    def test_when_it_is_loaded_then_only_the_folders_own_ends_hold(self, folder: Path) -> None:
        template = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ raise_exception('') if false }}"
        (folder / "chat_template.jinja").write_text(template)

        assert [line.split()[0] for line in loaded(folder).text.end_tokens] == [PAD]

    def test_when_it_refuses_an_assistants_turn_then_the_model_loads(self, folder: Path) -> None:
        refusing = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
        (folder / "chat_template.jinja").write_text(refusing)

        assert [line.split()[0] for line in loaded(folder).text.end_tokens] == [PAD]
