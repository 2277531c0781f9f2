"""Adapters in a native step: the bits of its operations one by one, and of the same tokens in any other batch."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from sluice.engine.adapters.folder import open_adapter
from sluice.engine.adapters.modules import modules_of
from sluice.engine.adapters.weights import AdapterWeights
from sluice.engine.config import Quantization
from sluice.engine.execution.kv_cache import make_caches
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.sequence import Sequence as Tokens
from sluice.kernels.adapters import NO_PLACE, RowPlaces
from sluice.kernels.adapters.products import AdaptedProducts, AdapterRoom
from sluice.kernels.decoder_step import StepAdapters, StepInputs
from tests.grids import cross_section
from tests.oracles.adapters import save_adapter
from tests.oracles.test_decoder_step import BLOCK_SIZE, CPU, MODELS, NUM_BLOCKS, layout_of, sequences, whole

RANKS = (4, 9, 16)
QUANTIZATIONS: list[Quantization] = ["none", "int8", "int4"]
Placed = Sequence[tuple[Tokens, int]]
"""Sequences, each with the place of its adapter."""


@pytest.fixture(autouse=True)
def _inference(native_products: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


def decoder_of(name: str, quantization: Quantization, folder: Path) -> Decoder:
    """A tiny model with an adapter of each of `RANKS` in places 0 to 2."""
    MODELS[name].save(folder, torch.bfloat16)
    opened = open_model_folder(folder)
    config = parse_config(opened.config)
    form = WeightForm(torch.bfloat16, CPU, quantization=quantization)
    decoder = load_decoder(config, opened.weights, form=form, max_model_len=160, max_tokens=256)
    modules = modules_of(config)
    room = AdapterRoom(num_places=len(RANKS), max_rank=max(RANKS), max_tokens=256)
    weights = decoder.weights
    products = AdaptedProducts(weights.adapted, [of.sizes for of in modules], room, like=weights.final_norm)
    for place, rank in enumerate(RANKS):
        saved = open_adapter(save_adapter(folder / f"rank-{rank}", folder, rank=rank, seed=place))
        products.put(place, AdapterWeights(saved, modules).pairs(torch.bfloat16))
    decoder.use_adapters(products)
    return decoder


def inputs_of(placed: Placed) -> StepInputs:
    parts = [whole(sequence) for sequence, _ in placed]
    inputs = layout_of(len(parts)).lay_out(parts)
    places = torch.tensor([place for sequence, place in placed for _ in sequence.token_ids], dtype=torch.int32)
    used = tuple(sorted({place for _, place in placed} - {NO_PLACE}))
    if not used:
        return inputs
    return inputs._replace(adapters=StepAdapters(RowPlaces(places, used), RowPlaces(places[inputs.logit_rows], used)))


def forward(decoder: Decoder, placed: Placed, *, by_operations: bool = False) -> torch.Tensor:
    """Logits of the last token of each sequence."""
    caches = make_caches(decoder.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=CPU)
    compute = decoder.forward_by_operations if by_operations else decoder.forward
    return compute(inputs_of(placed), caches).clone()


@pytest.mark.parametrize(("name", "quantization"), cross_section(list(MODELS), QUANTIZATIONS))
class TestGivenADecoderWithAdapters:
    def test_when_rows_have_several_adapters_or_none_then_each_has_its_own_bits(
        self, name: str, quantization: Quantization, tmp_path: Path
    ) -> None:
        decoder = decoder_of(name, quantization, tmp_path)
        placed = list(zip(sequences(), (0, NO_PLACE, 1, 2, 0), strict=True))

        actual = forward(decoder, placed)

        assert decoder.has_native_step
        assert torch.equal(actual, forward(decoder, placed, by_operations=True))
        assert torch.equal(actual, torch.cat([forward(decoder, [one]) for one in placed]))
        without = forward(decoder, [(sequence, NO_PLACE) for sequence in sequences()])
        assert (actual == without).all(dim=1).tolist() == [False, True, False, False, False]
