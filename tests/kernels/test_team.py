"""The threads that make a step: however many there are, who else needs them, and in a process that was forked."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from sluice.kernels.native import library
from sluice.kernels.sample import SampleOptions, sample


@pytest.fixture(autouse=True)
def _library() -> None:
    if library() is None:
        pytest.skip("there is no C compiler")


def greedy(num_rows: int) -> SampleOptions:
    """No row draws anything."""
    floats, ints = torch.zeros(num_rows), torch.zeros(num_rows, dtype=torch.int32)
    longs = torch.zeros(num_rows, dtype=torch.int64)
    return SampleOptions(
        temperature=floats, top_k=ints, top_p=floats + 1, min_p=floats, seed=longs, position=ints, counter_2=longs
    )


class TestGivenAnyNumberOfThreads:
    @pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 40])
    def test_when_rows_are_sampled_then_each_is_done_once(self, num_threads: int) -> None:
        logits = torch.randn(97, 1000, generator=torch.Generator().manual_seed(0))
        expected = logits.argmax(dim=1)
        before = torch.get_num_threads()

        torch.set_num_threads(num_threads)
        try:
            actual = [sample(logits, greedy(97)) for _ in range(20)]
        finally:
            torch.set_num_threads(before)

        assert all(torch.equal(tokens, expected) for tokens in actual)


class TestGivenTwoCallers:
    def test_when_they_sample_at_once_then_they_do_not_touch_each_other(self) -> None:
        logits = torch.randn(16, 20_000, generator=torch.Generator().manual_seed(0))
        options = replace(greedy(16), temperature=torch.ones(16), top_p=torch.full((16,), 0.9))
        expected = sample(logits, options)
        before = torch.get_num_threads()

        def draw(_number: int) -> torch.Tensor:
            return sample(logits, options)

        torch.set_num_threads(2)
        try:
            with ThreadPoolExecutor(2) as callers:
                actual = list(callers.map(draw, range(60)))
        finally:
            torch.set_num_threads(before)

        assert all(torch.equal(tokens, expected) for tokens in actual)


FORKED = """
import os, torch
from sluice.kernels.sample import sample
from tests.kernels.test_team import greedy
logits = torch.randn(64, 1000)
expected, options, out = sample(logits, greedy(64)), greedy(64), torch.zeros(64, dtype=torch.int64)
child = os.fork()
sample(logits, options, out=out)
is_same = out.tolist() == expected.tolist()
if not child:
    os._exit(0 if is_same else 1)
print(is_same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class TestGivenAForkedProcess:
    def test_when_it_samples_then_it_has_threads_of_its_own(self) -> None:
        done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)

        assert done.stdout.split() == ["True", "0"], done.stderr
