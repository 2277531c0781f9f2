"""The parent's side of a trial, with processes that answer, err, die or hang instead of running kernels."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sluice.kernels.trial import runner
from sluice.kernels.trial.runner import KernelTrial, Task, Verdict, tasks_of
from tests.kernels_triton.load.test_trial_cases import SIZES

CHILD = """
import json, os, sys, time
json.loads(sys.stdin.readline())
if "closed" in sys.argv: sys.exit(3)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    operation, index = json.loads(line)
    if operation == "rms_norm": answer = {"problem": "differs"}
    elif operation == "sample": os._exit(9)
    elif operation == "write_kv": time.sleep(60)
    elif operation == "penalties": answer = {"untried": "no memory"}
    else: answer = {}
    print(json.dumps(answer), flush=True)
    if answer.get("problem"): break
"""


def tried(*tasks: tuple[str, int], num_processes: int = 2, mode: str = "open") -> Verdict:
    """The verdict on these cases."""
    command = (sys.executable, "-c", CHILD, mode)
    return KernelTrial(SIZES, "cpu", [Task(*task) for task in tasks], command=command).run(num_processes)


class TestGivenProcessesThatTryCases:
    @pytest.mark.parametrize("num_processes", [1, 3])
    def test_when_all_are_well_then_nothing_is_reported(self, num_processes: int) -> None:
        verdict = tried(*(("linear", n) for n in range(7)), num_processes=num_processes)

        assert (verdict.problems, verdict.untried, verdict.num_cases) == ({}, {}, 7)

    def test_when_a_result_is_wrong_then_its_operation_fails_and_others_are_tried(self) -> None:
        verdict = tried(("rms_norm", 0), ("rms_norm", 1), ("linear", 0), num_processes=1)

        assert (verdict.problems, verdict.num_cases) == ({"rms_norm": "differs"}, 1)

    def test_when_a_process_dies_then_the_case_that_it_ran_is_blamed(self) -> None:
        verdict = tried(("sample", 0), ("linear", 0), num_processes=1)

        assert (verdict.problems, verdict.num_cases) == ({"sample": "its process ended with code 9"}, 1)

    def test_when_a_kernel_hangs_then_it_is_blamed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner, "CASE_LIMIT_S", 0.3)

        verdict = tried(("write_kv", 0), ("linear", 0), num_processes=1)

        assert (verdict.problems, verdict.num_cases) == ({"write_kv": "no answer within 0.3 s"}, 1)

    def test_when_it_is_stopped_then_a_case_that_runs_is_not_waited_for(self) -> None:
        command = (sys.executable, "-c", CHILD, "open")
        trial = KernelTrial(SIZES, "cpu", [Task("linear", 0), Task("write_kv", 0), Task("linear", 1)], command=command)
        with ThreadPoolExecutor(1) as thread:
            began_s, running = time.monotonic(), thread.submit(trial.run, 1)
            while trial.num_waiting > 1:
                time.sleep(0.01)
            trial.stop()
            verdict = running.result()

        assert time.monotonic() - began_s < 30, "the case takes a minute"
        assert verdict.num_cases == 1

    def test_when_memory_is_lacking_then_no_kernel_is_blamed(self) -> None:
        verdict = tried(("penalties", 0), ("linear", 0))

        assert (verdict.problems, verdict.untried, verdict.num_cases) == ({}, {"penalties": "no memory"}, 1)

    def test_when_no_process_opens_the_device_then_no_kernel_is_blamed(self) -> None:
        verdict = tried(("linear", 0), ("sample", 0), mode="closed")

        assert (verdict.problems, set(verdict.untried), verdict.num_cases) == ({}, {"linear", "sample"}, 0)


class TestGivenARealProcess:
    @pytest.mark.slow
    def test_when_kernels_run_on_the_cpu_then_it_answers_for_them(self) -> None:
        """They are the CPU's there: what is tested is the process."""
        tasks = [task for task in tasks_of(SIZES, "cpu") if task.operation in ("rms_norm", "prepare_batch")]

        verdict = KernelTrial(SIZES, "cpu", tasks).run(1)

        assert (verdict.problems, verdict.untried, verdict.num_cases) == ({}, {}, 4)
