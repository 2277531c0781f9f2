"""A whole engine whose every kernel stepped down: the same tokens, by torch's operators over a GPU's cache layout."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sluice import worker
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Grammar, Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.kernels.chain import HOPPER_PREFILL, OPERATIONS
from sluice.kernels.chain import Path as Chosen
from sluice.kernels.paged_attention import KVCache
from sluice.kernels.paged_attention.kernel import allocate_cuda
from tests.engine.given import Transcripts, note

FOLDER = Path(worker.__file__).parent / "small_model"
REQUESTS = [
    Request(
        id=str(n),
        prompt_token_ids=tuple((7 * n + 13 * i) % 900 for i in range(size)),
        sampling=Sampling(
            temperature=0.9 * (n % 2),
            top_k=30 * (n % 3),
            top_p=0.9,
            seed=n,
            max_tokens=6 + n,
            ignore_eos=n != 4,
            repetition_penalty=1.1 if n == 3 else 1.0,
        ),
        grammar=Grammar(kind="regex", text="[a-z ]*!") if n == 4 else None,
    )
    for n, size in enumerate([7, 60, 1, 33, 200, 18])
]


@contextmanager
def torch_in_place_of_cpu() -> Generator[set[str]]:
    """Take the path of a GPU whose kernels all stepped down, on CPU tensors; gives the operations that took it."""
    seen: set[str] = set()

    def path_of(operation: str, _tensor: torch.Tensor) -> Chosen:
        seen.add(operation)
        return Chosen.TORCH

    def allocate(*sizes: int, dtype: torch.dtype) -> KVCache:
        num_blocks, block_size, num_kv_heads, head_size = sizes
        return allocate_cuda(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=torch.device("cpu"))

    def none(*_: object) -> None:
        """The CPU's shortcuts are not taken."""

    with pytest.MonkeyPatch.context() as patch:
        for operation in OPERATIONS.keys() - {HOPPER_PREFILL}:
            where = f"sluice.kernels.{operation}"
            patch.setattr(f"{where}.cuda.path_of" if operation == "linear" else f"{where}.path_of", path_of)
        patch.setattr("sluice.kernels.paged_attention.cpu.allocate_cpu", allocate)
        patch.setattr("sluice.kernels.sample.cpu.draws_with_cpu", none)
        patch.setattr("sluice.engine.execution.layout._are_decodes", none)
        yield seen


def generate() -> dict[str, list[int]]:
    options = ModelOptions(
        path=FOLDER, dtype="float32", num_blocks=40, num_threads=1, max_num_seqs=4, max_num_batched_tokens=64, lag=1
    )
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
    engine, transcripts = LLMEngine(load_model_runner(options), load_tokenizer(FOLDER), config), Transcripts()
    engine.add(REQUESTS)
    while not engine.is_idle:
        note(transcripts, engine.advance())
    return {name: transcript.token_ids for (name, _), transcript in transcripts.items()}


def test_when_every_kernel_stepped_down_then_tokens_are_the_same() -> None:
    expected = generate()

    with torch_in_place_of_cpu() as seen:
        found = generate()

    unused = {"adapters", "experts", "linear", "soft_cap", "copy_blocks", "logprobs", HOPPER_PREFILL}
    assert seen == OPERATIONS.keys() - unused | (seen & {"copy_blocks"})
    assert found == expected
