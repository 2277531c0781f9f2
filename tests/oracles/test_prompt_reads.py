"""Vectors and log-probabilities of prompts: those of transformers, whatever the batch, chunks and disturbances are.

With the native products they are equal to the last bit: each row is summed in one order, and a mean is a sum of
integers.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from array import array
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, cast

import pytest
import torch

from sluice.engine.execution.reading import SLICE_ROWS
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import generates
from sluice.engine.request import CLASSES, ChoiceProgress, Embed, Pooling, PromptRead, Request, Sampling
from tests.oracles.engines import DISTURBED, FAILING, Setting, run
from tests.oracles.test_bfloat16_batch_invariance import DTYPE, MODEL
from tests.oracles.tiny_models import SIZES, TINY_MODELS, VOCAB_SIZE

LENGTHS = (1, 2, 30, SLICE_ROWS, SLICE_ROWS + 1)
CLASSIFYING = {
    "llama": "llama",
    "mistral": "mistral-window",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""Families with a class in transformers for it, each with one of our tiny models."""

QUICK = [name for name in ("llama", "gemma2", "qwen3") if name in TINY_MODELS]


def prompts() -> list[tuple[int, ...]]:
    random = Random(5)
    return [tuple(random.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]


def embedded(name: str, prompt: tuple[int, ...], pooling: Pooling) -> Request:
    return Request(id=name, prompt_token_ids=prompt, sampling=Sampling(max_tokens=0), embed=Embed(pooling=pooling))


def requests() -> list[Request]:
    """Of each prompt two vectors, its scores, a text with scores and two texts that share its beginning."""
    made: list[Request] = []
    for index, prompt in enumerate(prompts()):
        scored = Sampling(max_tokens=0, prompt_logprobs=3)
        continued = Sampling(max_tokens=6, prompt_logprobs=0, seed=index, logprobs=1, ignore_eos=True)
        plain = Sampling(max_tokens=4, seed=index, ignore_eos=True)
        made += [
            embedded(f"last {index}", prompt, "last"),
            embedded(f"mean {index}", prompt, "mean"),
            Request(id=f"scored {index}", prompt_token_ids=prompt, sampling=scored),
            Request(id=f"continued {index}", prompt_token_ids=prompt, sampling=continued, num_choices=2),
            Request(id=f"plain {index}", prompt_token_ids=prompt, sampling=plain, num_choices=2),
        ]
    return made


def floats(read: PromptRead) -> torch.Tensor:
    assert read.embedding is not None
    return torch.tensor(array("f", read.embedding))


class TestGivenATinyModel:
    @pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in TINY_MODELS]
    )
    def test_when_prompts_are_read_then_they_equal_those_of_transformers(self, name: str, tmp_path: Path) -> None:
        model = TINY_MODELS[name].save(tmp_path)

        outcome = run(tmp_path, requests(), Setting(max_num_batched_tokens=100, num_blocks=400))

        assert not outcome.errors
        with torch.inference_mode():
            for index, prompt in enumerate(prompts()):
                if name.endswith("longrope") and len(prompt) < 40:
                    continue  # there it is chosen by the prompt's own length
                expected = model(torch.tensor([prompt]), output_hidden_states=True)
                states = expected.hidden_states[-1][0]
                for pooling, state in (("last", states[-1]), ("mean", states.mean(0))):
                    actual = floats(outcome.prompts[f"{pooling} {index}"])
                    torch.testing.assert_close(actual, state / state.norm(), rtol=1e-4, atol=1e-5)
                logprobs = torch.log_softmax(expected.logits[0], -1)
                rows = list(outcome.prompts[f"scored {index}"].logprobs or ())[1:]
                chosen = torch.tensor([at.chosen for at in rows])
                own = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
                torch.testing.assert_close(chosen, own, rtol=1e-4, atol=1e-4)
                likeliest = torch.tensor([[value for _, value in at.top] for at in rows]).view(-1, 3)
                torch.testing.assert_close(likeliest, logprobs[:-1].topk(3).values, rtol=1e-4, atol=1e-4)


class TestGivenAModelWithoutAnOutputHead:
    def test_when_its_tensors_have_no_prefix_then_its_vectors_are_those_of_the_whole_model(
        self, tmp_path: Path
    ) -> None:
        whole = TINY_MODELS["qwen3"].save(tmp_path / "whole")
        cast("Any", whole).model.save_pretrained(tmp_path / "bare")  # as sentence-transformers saves it
        asked = [embedded(str(index), prompt, "mean") for index, prompt in enumerate(prompts())]

        found = run(tmp_path / "bare", asked)

        assert not found.errors
        assert found.prompts == run(tmp_path / "whole", asked).prompts
        folder = open_model_folder(tmp_path / "bare")
        assert not generates(parse_config(folder.config), folder.weights)


class TestGivenAClassificationHead:
    @pytest.mark.parametrize(
        "family", [one if one == "qwen3" else pytest.param(one, marks=pytest.mark.long) for one in CLASSIFYING]
    )
    @pytest.mark.parametrize("num_labels", [1, 3])
    def test_when_prompts_are_classified_then_scores_are_those_of_transformers(
        self, family: str, num_labels: int, tmp_path: Path
    ) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        torch.manual_seed(7)
        own = TINY_MODELS[CLASSIFYING[family]].config
        config = AutoConfig.for_model(family, **{**SIZES, **own, "num_labels": num_labels, "pad_token_id": None})
        model = cast("Any", AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)).eval()
        model.save_pretrained(tmp_path)
        asked = [
            Request(id=str(index), prompt_token_ids=prompt, sampling=Sampling(max_tokens=0), embed=CLASSES)
            for index, prompt in enumerate(prompts())
        ]

        outcome = run(tmp_path, asked, Setting(max_num_batched_tokens=50, block_size=4))

        assert not outcome.errors
        for index, prompt in enumerate(prompts()):
            expected = model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(floats(outcome.prompts[str(index)]), expected, rtol=1e-4, atol=1e-4)


@cache
def folder() -> Path:
    path = Path(mkdtemp(prefix="sluice-tiny-"))
    MODEL.save(path, torch.bfloat16)
    return path


@cache
def alone(block_size: int) -> dict[str, PromptRead]:
    """What is read of each prompt in a separate engine."""
    read: dict[str, PromptRead] = {}
    for request in requests():
        read |= run(folder(), [request], Setting(block_size=block_size), dtype=DTYPE).prompts
    return read


@pytest.mark.usefixtures("native_products")
class TestGivenNativeProducts:
    @pytest.mark.parametrize("setting", [s for s in [*DISTURBED.values(), *FAILING.values()] if not s.abort], ids=str)
    def test_when_prompts_run_in_any_batch_then_no_bit_depends_on_it(self, setting: Setting) -> None:
        outcome = run(folder(), requests(), setting, dtype=DTYPE)

        assert not outcome.errors
        assert outcome.prompts == alone(setting.block_size)

    @pytest.mark.parametrize("cut", [1, 5])
    def test_when_a_text_is_resumed_then_its_prompt_is_read_again(self, cut: int) -> None:
        request = next(request for request in requests() if request.id == "continued 3")
        whole = run(folder(), [request], dtype=DTYPE)
        first, second = (whole.token_ids[request.id, choice] for choice in range(2))
        ended = ChoiceProgress(token_ids=tuple(first), is_finished=True)
        later = Request(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            num_choices=2,
            progress=(ended, ChoiceProgress(token_ids=tuple(second[:cut]))),
        )

        outcome = run(folder(), [later], Setting(max_num_batched_tokens=7, max_num_seqs=4), dtype=DTYPE)

        assert outcome.token_ids[request.id, 1] == second[cut:]
        assert outcome.prompts == whole.prompts

    def test_when_only_some_dimensions_are_wanted_then_they_are_scaled_again(self) -> None:
        prompt = prompts()[2]
        whole = embedded("whole", prompt, "mean")
        cut = Request(
            id="cut",
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=0),
            embed=Embed(pooling="mean", dimensions=8),
        )

        outcome = run(folder(), [whole, cut], dtype=DTYPE)

        first = floats(outcome.prompts["whole"])[:8]
        torch.testing.assert_close(floats(outcome.prompts["cut"]), first / first.norm())
