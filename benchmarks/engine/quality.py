"""Quality cost of rounding: the small model's logits in float32, bfloat16 and int8 on questions it can answer.

    python -m benchmarks quality [--count N]

Held-out questions of every kind with their right answers, in the small model's format. For each answer token, compared
with float32: mean and largest difference of a logit, Kullback-Leibler divergence of the distribution, how often the
most probable token is the same, and the perplexity of the right tokens.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sluice.engine.batch import batch_of
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.request import SamplingParams
from sluice.engine.sequence import Sequence
from tools.small_model.example import Kind
from tools.small_model.measure import Speaker, held_out

FOLDER = Path(__file__).parents[2] / "worker" / "small_model"
BLOCK_SIZE = 16


def documents(count: int, max_tokens: int) -> Iterator[tuple[list[int], int]]:
    """Return token ids of question and answer, and the number of the question's."""
    speaker = Speaker(str(FOLDER))
    for kind in Kind:
        for example in held_out(kind, count):
            asked: list[int] = speaker.tokenizer.encode(speaker.prompt_text(example), add_special_tokens=False)
            answer: list[int] = speaker.tokenizer.encode(example.answer, add_special_tokens=False)
            token_ids = [*asked, *answer, speaker.tokenizer.eos_token_id][:max_tokens]
            if len(asked) < len(token_ids):
                yield token_ids, len(asked)


@torch.inference_mode()
def answer_logits(runner: ModelRunner, token_ids: list[int], num_asked: int) -> Tensor:
    """Return the logits before each token of the answer, `[answer, V]`."""
    sequence = Sequence(
        id=0,
        request_id="0",
        choice=0,
        sampling=SamplingParams(temperature=0),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        block_table=list(range(-(-len(token_ids) // BLOCK_SIZE))),
    )
    tensors = runner.lay_out(batch_of([(sequence, 0, len(token_ids), True)]))
    wanted = torch.arange(num_asked - 1, len(token_ids) - 1)
    return runner.forward(replace(tensors, logit_rows=wanted)).float().clone()


def print_row(name: str, exact: Tensor, rounded: Tensor, right: Tensor) -> None:
    """Compare `rounded` with `exact`, `[tokens, V]` each."""
    expected, actual = exact.log_softmax(-1), rounded.log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    difference = (exact - rounded).abs()
    agreement = (exact.argmax(-1) == rounded.argmax(-1)).float().mean()
    perplexity = [float((-each.gather(1, right[:, None]).mean()).exp()) for each in (expected, actual)]
    print(
        f"{name:<10} logit {difference.mean():.4f} mean {difference.max():.2f} max | KL {divergence.mean():.6f} mean "
        f"{divergence.quantile(0.99):.5f} p99 | same best token {agreement:.2%} | "
        f"perplexity {perplexity[0]:.4f} -> {perplexity[1]:.4f}"
    )


def load(dtype: str, quantization: Literal["none", "int8"]) -> ModelRunner:
    """Load the small model in one form."""
    return load_model_runner(
        ModelOptions(path=FOLDER, dtype=dtype, quantization=quantization, num_blocks=256, block_size=BLOCK_SIZE)
    )


def main() -> None:
    """Print a row for each form, compared with float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, help="questions of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    exact_runner = load("float32", "none")
    runners = {"bfloat16": load("bfloat16", "none"), "int8": load("bfloat16", "int8")}
    exact: list[Tensor] = []
    right: list[Tensor] = []
    rounded: dict[str, list[Tensor]] = {name: [] for name in runners}
    for token_ids, num_asked in documents(arguments.count, exact_runner.limits.max_model_len):
        exact.append(answer_logits(exact_runner, token_ids, num_asked))
        right.append(torch.tensor(token_ids[num_asked:]))
        for name, runner in runners.items():
            rounded[name].append(answer_logits(runner, token_ids, num_asked))
    print(f"{len(exact)} answers, {sum(map(len, right))} tokens, compared with float32:")
    for name, each in rounded.items():
        print_row(name, torch.cat(exact), torch.cat(each), torch.cat(right))


if __name__ == "__main__":
    main()
