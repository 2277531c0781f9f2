"""How long the largest prompts stop other threads, such as the engine's loop; and what is refused at once."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from sluice.engine.executor import ModelLimits
from sluice.engine.null_model import NullModel
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.protocol.limits import MAX_PROMPT_BYTES
from sluice.protocol.wire import Message, Prompt
from sluice.worker.errors import JobRejected
from sluice.worker.model.chat_template import compile_template
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.translate import Translator, bounded_encoder
from tests.grids import fast_only
from tests.worker.model.test_translate import held

NUM_BYTES = MAX_PROMPT_BYTES - 64
LARGEST: dict[str, Prompt] = {
    "words": "the quick brown fox " * (NUM_BYTES // 20),
    "one_word": "x" * NUM_BYTES,
    "spaces": " " * NUM_BYTES,
    "emoji": "\N{GRINNING FACE}" * (NUM_BYTES // 4),
    "token_ids": (1,) * NUM_BYTES,
    "one_message": (Message(role="user", content="the quick brown fox " * (NUM_BYTES // 20)),),
    "many_messages": (Message(role="user", content="yes"),) * (NUM_BYTES // 16),
}


def translator(*, max_model_len: int) -> Translator:
    """The shipped model's tokenizer, under a context of this length."""
    limits: ModelLimits = replace(NullModel().limits, max_model_len=max_model_len)
    template = compile_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {})
    encode = bounded_encoder(load_tokenizer(SMALL_MODEL), limits)
    return Translator(encode=encode, template=template, validate=lambda _: None, model="m")


def longest_pause_s(work: Callable[[], object]) -> float:
    """Return the longest processor time that another thread took for `work` while this one did not run."""
    worker = threading.Thread(target=work)
    longest, last = 0.0, time.process_time()
    worker.start()
    while worker.is_alive():
        worker.join(0.001)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return longest


class TestGivenAModelThatReadsAnyLength:
    @pytest.mark.parametrize("kind", LARGEST)
    @pytest.mark.long
    def test_when_the_largest_prompt_is_translated_then_the_loop_goes_on(self, kind: str) -> None:
        job, anything = held(LARGEST[kind]), translator(max_model_len=10**9)

        # 0.3 s on an idle machine; `Tokenizer.encode` of the library held the GIL for 3 to 11 s.
        assert longest_pause_s(lambda: anything.translate(job)[0]) < 2


class TestGivenAModelOfTheUsualLength:
    @pytest.mark.parametrize(
        "kind", fast_only(["words"], ["one_word", "spaces", "emoji", "one_message", "many_messages"])
    )
    def test_when_no_tokens_could_fit_then_it_is_refused_before(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usual = translator(max_model_len=4096)
        monkeypatch.setattr("sluice.engine.text.tokenizer.Tokenizer.encode", pytest.fail)

        with pytest.raises(JobRejected, match="bytes of text; the 4096 tokens that this model reads") as rejection:
            usual.translate(held(LARGEST[kind]))[0]

        assert rejection.value.code == "prompt_too_long"

    def test_when_it_may_fit_then_its_tokens_decide(self) -> None:
        assert len(translator(max_model_len=4096).translate(held("yes " * 4000))[0].prompt_token_ids) > 4000
