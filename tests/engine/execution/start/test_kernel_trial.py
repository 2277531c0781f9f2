"""The choice of a GPU's kernels: what a trial found, and what fails at its first use in a step."""

import logging
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from sluice import worker
from sluice.engine.errors import KernelsUnavailable, OutOfMemory
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start import kernel_trial
from sluice.engine.execution.start.kernel_trial import (
    choose,
    kernels_tried,
    num_processes,
    sizes_of,
    step_down_if_it_fails,
)
from sluice.engine.execution.start.model_loading import plan_load
from sluice.kernels import chain
from sluice.kernels.paged_attention import config
from sluice.kernels.trial.runner import Verdict

FOLDER = Path(worker.__file__).parent / "small_model"
WRONG = Verdict(problems={"sample": "differs", "rms_norm": "its process ended with code -6"})


@pytest.fixture(autouse=True)
def whole_chain() -> Generator[None]:
    chain.step_down({})
    yield
    chain.step_down({})


def failing_in(operation: str, error: str, *, file: str = "") -> Callable[[], str]:
    """A step that raises in the code of `operation`, until that has stepped down."""
    code = compile(f"def launch(): raise {error}", f"/anywhere/kernels/{file or f'{operation}/kernel.py'}", "exec")
    names: dict[str, Callable[[], None]] = {}
    exec(code, {"OutOfMemory": OutOfMemory}, names)

    def step() -> str:
        if operation not in chain.stepped_down():
            names["launch"]()
        return "done"

    return step


class TestGivenATrialThatFoundFaults:
    def test_when_it_may_then_these_operations_step_down_and_it_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            choose(WRONG, "auto")

        assert chain.stepped_down() == WRONG.problems
        assert [record.getMessage().rpartition("it: ")[2] for record in caplog.records] == [
            "rms_norm: its process ended with code -6",
            "sample: differs",
        ]

    def test_when_only_triton_is_allowed_then_the_model_is_not_loaded(self) -> None:
        with pytest.raises(KernelsUnavailable, match="kernel of rms_norm does not work on this machine: its process"):
            choose(WRONG, "triton")

    def test_when_it_is_that_for_hopper_then_other_triton_kernels_replace_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            choose(Verdict(problems={chain.HOPPER_PREFILL: "differs"}), "triton")

        assert chain.description() == "triton, without hopper_prefill"
        assert "attention's other kernels replace it: hopper_prefill: differs" in caplog.text

    def test_when_a_kernel_could_not_be_tried_then_it_stays_and_it_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            choose(Verdict(untried={"sample": "no memory"}), "triton")

        assert chain.stepped_down() == {}
        assert "could not be tried" in caplog.text


class TestGivenAKernelThatFailsInAStep:
    def test_when_its_code_raised_then_it_steps_down_and_the_step_is_repeated(self) -> None:
        step_down_if_it_fails(failing_in("write_kv", "RuntimeError('out of resource: shared memory')"), "auto")

        assert chain.stepped_down() == {"write_kv": "RuntimeError: out of resource: shared memory"}

    def test_when_it_is_that_for_hopper_then_attention_has_its_kernel_for_any_gpu(self) -> None:
        failing = failing_in("hopper_prefill", "RuntimeError('no')", file="paged_attention/hopper.py")

        step_down_if_it_fails(failing, "auto")

        assert chain.stepped_down() == {"hopper_prefill": "RuntimeError: no"}
        assert chain.can_record()

    def test_when_the_device_is_lost_then_nothing_is_repeated(self) -> None:
        with pytest.raises(RuntimeError, match="illegal"):
            step_down_if_it_fails(failing_in("write_kv", "RuntimeError('an illegal memory access')"), "auto")

        assert chain.stepped_down() == {}

    @pytest.mark.parametrize("error", ["OutOfMemory('no')", "ValueError('not of a kernel')"])
    def test_when_no_kernel_is_at_fault_then_none_steps_down(self, error: str) -> None:
        with pytest.raises((OutOfMemory, ValueError)):
            step_down_if_it_fails(failing_in("no_operation", error), "auto")

        assert chain.stepped_down() == {}


class WaitingTrial:
    """A trial that ends once it is stopped."""

    def __init__(self, *_: object) -> None:
        self._stopped = threading.Event()

    def run(self, _num_processes: int) -> Verdict:
        assert self._stopped.wait(60), "it was not stopped"
        return Verdict()

    def stop(self) -> None:
        self._stopped.set()


def never(_device: torch.device) -> bool:
    return False


class TestGivenALoadThatFails:
    def test_when_its_error_is_raised_then_the_trial_is_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_trial, "KernelTrial", WaitingTrial)
        monkeypatch.setattr(config, "has_hopper_kernel", never)
        plan = plan_load(ModelOptions(path=FOLDER))
        sizes = sizes_of(plan.config, plan.dtype, plan.options, plan.max_model_len)

        with pytest.raises(ValueError, match="corrupt"), kernels_tried(sizes, "cuda:0", "auto", 1):
            raise ValueError("corrupt weights")

        assert chain.stepped_down() == {}


class TestGivenADevice:
    PLAN = plan_load(ModelOptions(path=FOLDER))

    @pytest.mark.parametrize(
        ("device", "wanted", "expected"), [("cpu", "torch", 0), ("cuda:0", "torch", len(chain.OPERATIONS))]
    )
    def test_when_torch_is_asked_for_then_every_operation_of_a_gpu_is_torch_s(
        self, device: str, wanted: str, expected: int
    ) -> None:
        assert wanted == "torch"
        plan = self.PLAN
        with kernels_tried(sizes_of(plan.config, plan.dtype, plan.options, plan.max_model_len), device, "torch", 1):
            pass

        assert len(chain.stepped_down()) == expected

    def test_when_it_is_a_cpu_then_one_process_is_enough(self) -> None:
        assert num_processes([], torch.device("cpu")) == 1

    def test_when_the_kernels_are_others_then_so_is_the_fingerprint(self) -> None:
        dtype, folder = self.PLAN.dtype, self.PLAN.folder
        names = ["", "triton", "triton, torch for sample"]

        assert len({folder.fingerprint(dtype, kernels=name) for name in names}) == 3
