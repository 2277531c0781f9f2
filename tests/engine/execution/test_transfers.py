"""Copies between host and device. On the CPU there are none; with a GPU they must not be overtaken."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import numpy as np
import pytest
import torch

from sluice.engine.execution.transfers import PendingCopy, to_device

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


def keep_busy() -> None:
    """Give the GPU work for some tenths of a second: what is asked of it next has not run when the host continues."""
    matrix = torch.zeros(8192, 8192, device=GPU)
    for _ in range(20):
        matrix = matrix @ matrix


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    tensor = to_device(array, CPU)

    (arrived,) = PendingCopy((tensor,), CPU).wait()

    array[0] = 7
    assert arrived.tolist() == [7, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGivenADeviceThatIsBusy:
    def test_when_the_host_writes_its_buffer_again_then_the_old_values_arrive(self) -> None:
        array = np.arange(1000)
        keep_busy()

        sent = [to_device(array, GPU)]
        for _ in range(3):
            array[:] = -1
            sent.append(to_device(array, GPU))

        assert sent[0].tolist() == list(range(1000))

    def test_when_results_are_read_then_they_are_from_before_the_next_launch(self) -> None:
        drawn = torch.arange(1000, device=GPU)
        keep_busy()

        pending_copy = PendingCopy((drawn,), GPU)
        drawn.fill_(-1)

        assert pending_copy.wait()[0].tolist() == list(range(1000))

    def test_when_nothing_is_to_arrive_then_what_was_launched_is_waited_for(self) -> None:
        keep_busy()

        PendingCopy((), GPU).wait()

        assert torch.cuda.current_stream(GPU).query()
