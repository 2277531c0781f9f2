"""A model with window groups on Triton's kernels, eager and over the buffers of recorded steps."""

from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest

from benchmarks.gpu.models import triton_in_place_of_cpu
from sluice.engine.request import Request, Sampling
from tests.oracles.engines import Setting, run
from tests.oracles.tiny_models import TINY_MODELS, VOCAB_SIZE


@pytest.mark.long
@pytest.mark.timeout(400)
class TestGivenPromptsLongerThanTheWindow:
    @pytest.mark.parametrize("graphs", [False, True])
    def test_when_triton_computes_then_tokens_are_those_of_the_cpu(self, *, graphs: bool) -> None:
        folder, random = Path(mkdtemp(prefix="sluice-tiny-")), Random(1)
        TINY_MODELS["gemma3"].save(folder)
        asked = [
            Request(
                id=str(length),
                prompt_token_ids=tuple(random.randrange(2, VOCAB_SIZE) for _ in range(length)),
                sampling=Sampling(temperature=0, max_tokens=4, ignore_eos=True),
            )
            for length in (25, 5)
        ]
        setting = Setting(block_size=4, num_blocks=60, max_num_seqs=2, max_num_batched_tokens=16, lag=1, graphs=graphs)
        expected = run(folder, asked, Setting())

        with triton_in_place_of_cpu():
            outcome = run(folder, asked, setting)

        assert outcome.errors == {}
        assert outcome.token_ids == expected.token_ids
