"""Weights on their way to a device, here one that takes what is sent to it as late as it may."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from sluice import worker
from sluice.engine.execution.memory import peak_bytes
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.models.weight_copies import WeightCopier
from sluice.kernels.embedding import embed
from sluice.kernels.experts import Dense

FOLDER = Path(worker.__file__).parent / "small_model"
CPU = torch.device("cpu")
MIB = 2**20


@dataclass(slots=True, eq=False)
class Late:
    """A copy that runs when somebody waits for it, as an asynchronous one may."""

    piece: Tensor
    place: Tensor
    is_over: bool = False

    def synchronize(self) -> None:
        if not self.is_over:
            self.place.copy_(self.piece)
            self.is_over = True


@dataclass(slots=True, eq=False)
class LateDevice:
    """Keeps what was sent to it. Changes with each copy."""

    sent: list[Late] = field(default_factory=list[Late])
    is_in_order: bool = False
    """Whether all that is asked of it later sees what was sent before, as on a GPU's stream."""

    def send(self, piece: Tensor, place: Tensor) -> Late:
        self.sent.append(Late(piece, place))
        if self.is_in_order:
            # What computes here reads at once.
            self.sent[-1].synchronize()
        return self.sent[-1]

    @property
    def num_on_their_way(self) -> int:
        return sum(not late.is_over for late in self.sent)


def copier(device: LateDevice, *, buffer_bytes: int = 64, num_buffers: int = 3) -> WeightCopier:
    return WeightCopier(device.send, is_pinned=False, buffer_bytes=buffer_bytes, num_buffers=num_buffers)


class TestGivenADeviceThatTakesThingsLate:
    @given(
        sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
        num_buffers=st.integers(1, 4),
        dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 2),
    )
    def test_when_weights_are_copied_then_each_arrives_whole_whatever_the_buffers_are(
        self, sizes: list[int], num_buffers: int, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        sources = [torch.randn(size, generator=generator).to(dtypes[0]) for size in sizes]
        places = [torch.full((size,), float("nan"), dtype=dtypes[1]) for size in sizes]
        device = LateDevice()
        copies = copier(device, num_buffers=num_buffers)

        for source, place in zip(sources, places, strict=True):
            copies.copy(source, place)
            assert device.num_on_their_way <= num_buffers
        copies.finish()

        assert device.num_on_their_way == 0
        for source, place in zip(sources, places, strict=True):
            assert torch.equal(place, source.to(dtypes[1]))

    def test_when_one_is_longer_than_a_buffer_then_several_are_on_their_way_at_once(self) -> None:
        device = LateDevice()

        copier(device).copy(torch.arange(100.0), torch.empty(100))

        assert len(device.sent) == 7
        assert device.num_on_their_way == 3, "the host did not wait for a copy that it need not wait for"


def load(dtype: torch.dtype, copies: WeightCopier | None) -> Decoder:
    folder = open_model_folder(FOLDER)
    return load_decoder(
        parse_config(folder.config),
        folder.weights,
        form=WeightForm(dtype, CPU),
        max_model_len=64,
        max_tokens=16,
        copier=copies,
    )


def numbers_of(decoder: Decoder) -> list[Tensor]:
    """What can be seen of the weights: those that stay as they are, and products of those that are packed."""
    weights, layer = decoder.weights, decoder.weights.layers[-1]
    rows = torch.eye(decoder.config.hidden_size, dtype=weights.dtype)
    assert layer.attention_norm is not None
    assert isinstance(layer.feed_forward, Dense)
    embedded = torch.empty(decoder.config.vocab_size, decoder.config.hidden_size, dtype=weights.dtype)
    embed(weights.embedding, torch.arange(decoder.config.vocab_size), out=embedded)
    return [
        embedded,
        weights.final_norm,
        layer.attention_norm,
        layer.qkv(rows).clone(),
        layer.feed_forward.gated(rows).clone(),
        weights.output(rows).clone(),
    ]


class TestGivenAModelFolder:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_when_loaded_through_the_ring_then_its_weights_are_those_of_the_files(self, dtype: torch.dtype) -> None:
        device = LateDevice(is_in_order=True)

        copied = load(dtype, copier(device, buffer_bytes=10_000))

        assert len(device.sent) > 100
        for actual, expected in zip(numbers_of(copied), numbers_of(load(dtype, None)), strict=True):
            assert torch.equal(actual, expected)


class TestGivenLargeWeights:
    """192 MiB in six tensors."""

    def test_when_copied_then_the_host_never_has_more_of_them_than_the_buffers(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        save_file({f"t{n}": torch.ones(8 * MIB) for n in range(6)}, file)
        (tmp_path / "config.json").write_text("{}")
        out = torch.ones(8 * MIB)

        def compute() -> None:
            weights = open_model_folder(tmp_path).weights
            copies = copier(LateDevice(), buffer_bytes=4 * MIB)
            for n in range(6):
                copies.copy(weights.get(f"t{n}", (8 * MIB,)), out)
            copies.finish()

        # One mapped tensor at a time is resident while it is read: 32 MiB of the file's pages, and 12 of buffers.
        assert peak_bytes(CPU, compute) < 60 * MIB
