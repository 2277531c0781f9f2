"""The part of a step that is recorded must never make the host wait: with every launcher, without a GPU and on one."""

# torch's types are partial, and triton's language is not typable.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.gpu.models import FAMILIES, SMALL, decode_tensors, triton_in_place_of_cpu
from sluice.engine.models.config import DecoderConfig, parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.kernels.decoder_step import StepInputs
from sluice.kernels.paged_attention import FP8, KVCache
from sluice.kernels.paged_attention.kernel import allocate_cuda
from sluice.kernels.sample.kernel import sample_triton
from tests.engine.execution.recordings.test_cuda_graphs import ASKED, load, record_all_that_is_wanted, run
from tests.engine.execution.synchronisation import NoSynchronisation, Synchronises
from tests.oracles.kernel_cases import make_options

META = torch.device("meta")
SYNCHRONISING: dict[str, Callable[[Tensor], object]] = {
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "truth": lambda x: bool(x.sum()),
    "nonzero": torch.nonzero,
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "bincount": torch.bincount,
}
TO_HOST: dict[str, Callable[[Tensor], object]] = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float32),
    "copy_": lambda x: torch.empty(3, dtype=x.dtype).copy_(x),
}


class EmptyWeights:
    """Weights of any name, without memory, and what would copy them to a device."""

    def get(self, _name: str, shape: tuple[int, ...], _dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of `shape`."""
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    def num_rows(self, name: str) -> int:
        """Return that only scores of classes are missing."""
        return 0 if name.startswith("score") else 1

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy nothing."""

    def finish(self) -> None:
        """Wait for nothing."""


def decoder_of(family: str, *, is_int8: bool) -> Decoder:
    model_type, extra = FAMILIES[family]
    config = parse_config(SMALL | extra | {"model_type": model_type})
    form = WeightForm(torch.bfloat16, META, quantization="int8" if is_int8 else "none")
    weights: Any = EmptyWeights()  # stands for two types
    with triton_in_place_of_cpu():
        return load_decoder(config, weights, form=form, max_model_len=512, max_tokens=512, copier=weights)


def caches_of(config: DecoderConfig, dtype: torch.dtype) -> list[KVCache]:
    sizes = (64, 16, config.num_kv_heads, config.head_size)
    return [allocate_cuda(*sizes, dtype=dtype, device=META) for _ in range(config.num_layers)]


class TestGivenAnOperatorThatWaits:
    @pytest.mark.parametrize("name", SYNCHRONISING)
    def test_when_it_is_called_then_it_is_named(self, name: str) -> None:
        with pytest.raises(Synchronises, match="waits for the device"), NoSynchronisation():
            SYNCHRONISING[name](torch.arange(3))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", [*SYNCHRONISING, *TO_HOST])
    def test_when_it_is_called_on_a_card_then_it_is_named(self, name: str) -> None:
        x = torch.arange(3, device="cuda")

        with pytest.raises(Synchronises), NoSynchronisation():
            (SYNCHRONISING | TO_HOST)[name](x)


class TestGivenTheLaunchersOfACard:
    """Tensors without memory, and kernels that are not run: what is left is what the host does."""

    @pytest.mark.parametrize("max_query_len", [1, 3])
    @pytest.mark.parametrize("is_narrow", [False, True])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_when_a_step_is_computed_then_nothing_waits(
        self, monkeypatch: pytest.MonkeyPatch, family: str, is_narrow: bool, max_query_len: int
    ) -> None:
        launched = list[str]()

        def launch(kernel: Any, *_args: object, **_named: object) -> None:  # triton's own type
            launched.append(kernel.__name__)

        monkeypatch.setattr(JITFunction, "run", launch)
        decoder = decoder_of(family, is_int8=is_narrow)
        caches = caches_of(decoder.config, FP8 if is_narrow else torch.bfloat16)
        inputs = decode_tensors(5, 100, 16, META)._replace(max_query_len=max_query_len)
        options = make_options([{"temperature": 0}, {"top_p": 0.9}, {"top_k": 3}, {}, {"min_p": 0.1}], META)

        with triton_in_place_of_cpu(), NoSynchronisation():
            logits = decoder.forward(inputs, caches)
            sample_triton(logits, options, out=torch.empty(5, dtype=torch.int64, device=META))

        assert logits.shape == (5, 211)
        assert len(launched) > 4 * decoder.config.num_layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGivenACard:
    def test_when_steps_are_recorded_then_nothing_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = load(graphs=True, device="cuda:0")
        assert runner.graphs is not None
        compute = runner.graphs._compute  # pyright: ignore[reportPrivateUsage]
        computed = list[StepInputs]()

        def strictly(inputs: StepInputs) -> Tensor:
            computed.append(inputs)
            with NoSynchronisation():
                return compute(inputs)

        monkeypatch.setattr(runner.graphs, "_compute", strictly)
        run(runner, ASKED)

        record_all_that_is_wanted(runner)

        assert computed
        assert runner.graphs.last_problem is None
