"""Scores and vectors through a gateway are those of others' libraries: lm-eval's `hf`, and sentence-transformers."""

import json
import math
from pathlib import Path

import pytest

from sluice.worker.model.folders import SMALL_MODEL
from tests.clients.environments import python_client
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import gateway_process
from tests.servers import RedisServer
from tests.thinking_model import thinking_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.clients]

QUESTIONS = (
    ("The little fox lived in the", [" woods.", " river of small stones.", " xylophone"]),
    ("12 + 30 =", [" 42", " 41", " a number"]),
    ("Once upon a time there was a king. The king had", [" a crown.", " a crown, and a horse that was white.", "\n\n"]),
    ("3, 4, 5,", [" 6, 7, 8", " 9", " größer"]),
)
TEXTS = ["The cat sat.", "A cat was sitting on the mat, and looked at the river for a long time.", "x", "def f(x): ..."]
NEAR_LOGPROB, NEAR_VECTOR = 5e-4, 1e-5
"""Sums of float32 in another order."""


class TestGivenLmEval:
    def test_when_it_scores_through_the_gateway_then_log_likelihoods_are_those_of_its_own_model(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        questions = tmp_path / "questions.jsonl"
        questions.write_text("".join(json.dumps({"text": text, "choices": many}) + "\n" for text, many in QUESTIONS))
        client = python_client("evaluation")
        with worker_pool(valkey.url, tmp_path) as pool, gateway_process(valkey.url) as gateway:
            pool.start_all(1, MODEL=str(SMALL_MODEL), DTYPE="float32")

            [served] = client.using(gateway.url).run("served", str(SMALL_MODEL), str(questions))[-1:]
        [loaded] = client.run("loaded", str(SMALL_MODEL), str(questions))[-1:]

        assert [len(scores) for scores in served["scores"]] == [3] * len(QUESTIONS)
        for ours, theirs in zip(served["scores"], loaded["scores"], strict=True):
            for (value, is_greedy), (expected, is_greedy_there) in zip(ours, theirs, strict=True):
                assert value == pytest.approx(expected, abs=NEAR_LOGPROB)
                assert is_greedy == is_greedy_there


class TestGivenSentenceTransformers:
    @pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
    def test_when_it_has_the_same_folder_then_the_vectors_are_the_same(
        self, valkey: RedisServer, tmp_path: Path, pooling: str
    ) -> None:
        folder, texts = _sentence_model(tmp_path / "embedder", pooling), tmp_path / "texts.json"
        texts.write_text(json.dumps(TEXTS))
        with worker_pool(valkey.url, tmp_path) as pool, gateway_process(valkey.url) as gateway:
            pool.start_all(1, MODEL=str(folder), DTYPE="float32")

            answer = gateway.client().embeddings.create(model=folder.name, input=TEXTS)
        [theirs] = python_client("evaluation").run("embed", str(folder), str(texts))[-1:]

        for ours, expected in zip(answer.data, theirs["vectors"], strict=True):
            assert math.hypot(*ours.embedding) == pytest.approx(1, abs=NEAR_VECTOR)
            assert ours.embedding == pytest.approx(expected, abs=NEAR_VECTOR)


def _sentence_model(folder: Path, pooling: str) -> Path:
    """A tiny random model as sentence-transformers saves one."""
    thinking_model(folder, is_opened=False)
    (folder / "chat_template.jinja").unlink()  # it would encode a chat
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
    (folder / "2_Normalize").mkdir()
    return folder
