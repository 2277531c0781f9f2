"""What a device's name stands for."""

import os
import subprocess
from typing import Any

import pytest

from sluice.worker import devices
from sluice.worker.devices import devices_of, is_device, is_several, num_gpus, show_devices_from
from sluice.worker.errors import ConfigError


class TestGivenNamesOfDevices:
    @pytest.mark.parametrize(
        ("name", "stands_for"),
        [
            ("cpu", ["cpu"]),
            ("cuda", ["cuda"]),
            ("cuda:3", ["cuda:3"]),
            ("cuda:0,2", ["cuda:0", "cuda:2"]),
            ("cuda:2,0,2", ["cuda:2", "cuda:0"]),
            ("cuda:all", ["cuda:0", "cuda:1", "cuda:2"]),
        ],
    )
    def test_when_read_where_there_are_three_then_each_is_named(self, name: str, stands_for: list[str]) -> None:
        assert is_device(name)
        assert devices_of(name, count_gpus=lambda: 3) == stands_for

    @pytest.mark.parametrize(
        "name", ["gpu", "cuda:", "cuda:one", "cuda:0,", "cuda:,1", "cuda:all,1", "cpu:0", "CUDA:0"]
    )
    def test_when_it_names_none_then_it_is_reported(self, name: str) -> None:
        assert not is_device(name)

    @pytest.mark.parametrize(
        ("name", "several"), [("cpu", False), ("cuda:1", False), ("cuda:0,1", True), ("cuda:all", True)]
    )
    def test_when_asked_whether_it_names_several_then_it_says_so(self, name: str, several: bool) -> None:
        assert is_several(name) is several


class TestGivenAHostWithoutGpus:
    @pytest.mark.parametrize(
        ("output", "expected"),
        [
            ((0, "0 \n", ""), "there is no GPU (0 found; this torch is built without CUDA)"),
            ((0, "0 12.9\n", ""), "there is no GPU (0 found): run on --cpu"),
            ((1, "", "Traceback\nModuleNotFoundError: No module named 'torch'\n"), "No module named 'torch'"),
        ],
    )
    def test_when_all_are_asked_for_then_the_operator_learns_why_not(
        self, monkeypatch: pytest.MonkeyPatch, output: tuple[int, str, str], expected: str
    ) -> None:
        def answer(arguments: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(arguments, *output)

        monkeypatch.setattr(devices.subprocess, "run", answer)

        with pytest.raises(ConfigError) as caught:
            num_gpus()

        assert expected in str(caught.value)


class TestGivenSeveralGpus:
    @pytest.mark.parametrize(
        ("visible", "index", "seen"),
        [(None, 2, "2,3,4"), ("4,5,6", 0, "4,5,6"), ("4,5,6", 1, "5,6"), ("GPU-a,GPU-b", 1, "GPU-b")],
    )
    def test_when_one_is_named_then_an_engine_sees_it_and_those_after_it(
        self, monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, seen: str
    ) -> None:
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        show_devices_from(index)

        found = os.environ["CUDA_VISIBLE_DEVICES"]
        assert found.startswith(seen) if visible is None else found == seen
