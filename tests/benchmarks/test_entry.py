"""The one entry to the benchmarks: `python -m benchmarks NAME`."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, module_of


class TestGivenTheTableOfBenchmarks:
    @pytest.mark.parametrize("name", list(BENCHMARKS))
    def test_when_a_name_is_looked_up_then_its_module_has_a_main(self, name: str) -> None:
        spec = find_spec(module_of(name))
        assert spec is not None
        assert spec.origin is not None

        # Parsed, not imported: some modules import torch.
        functions = [node for node in ast.parse(Path(spec.origin).read_text("utf-8")).body if _is_function(node)]

        assert "main" in {getattr(node, "name", None) for node in functions}


def _is_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
