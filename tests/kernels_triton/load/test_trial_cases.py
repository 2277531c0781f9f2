"""The cases of a trial at load, here on interpreted kernels: right ones pass, broken ones do not.

Sizes are those of a small model with every switch.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.models import triton_in_place_of_cpu
from sluice.kernels.chain import HOPPER_PREFILL, OPERATIONS
from sluice.kernels.decoder_shape import MixtureShape
from sluice.kernels.linear.words import FLOAT8_CODES, WordForm
from sluice.kernels.paged_attention import layout
from sluice.kernels.trial.cases import cases_of
from sluice.kernels.trial.compare import WrongResult, require_same_rows
from sluice.kernels.trial.sizes import ModelSizes
from tests.grids import fast_only
from tests.kernels_triton.invariant.matrix_unit import matrix_unit

CPU = torch.device("cpu")
SIZES = ModelSizes(
    dtype="float16",
    hidden_size=48,
    intermediate_size=80,
    vocab_size=97,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    rotary_size=16,
    block_size=16,
    max_model_len=90,
    sliding_windows=(0, 33),
    attention_scale=0.25,
    attention_soft_cap=5.0,
    final_soft_cap=3.0,
    norm_eps=1e-6,
    head_norm_eps=1e-6,
    logit_scale=1.0,
    norm_offset=1.0,
    activation="gelu_tanh",
    has_qkv_bias=True,
    has_output_bias=False,
    has_mlp_bias=True,
    has_head_norm=True,
    has_row_norm=False,
    is_norm_centered=False,
    has_pre_norms=True,
    has_post_norms=True,
    is_parallel=False,
    is_int8=True,
    cache="model",
    mixture=MixtureShape(
        layers=(True, False), num_experts=9, num_chosen=2, intermediate_size=40, shared_size=24, is_normalised=False
    ),
    adapter_rank=5,
)


PACKED = [
    WordForm.of_groups(4),
    WordForm.of_spans(4, 64, 128),
    WordForm.of_spans(8, 64, 64),
    WordForm(8, 128, FLOAT8_CODES),
    WordForm(8, 0, FLOAT8_CODES),
]


def try_all(operation: str, sizes: ModelSizes) -> int:
    """Run an operation's cases; returns how many there are."""
    torch.manual_seed(1)
    unit = matrix_unit() if sizes.is_deterministic else nullcontext()
    with triton_in_place_of_cpu(deterministic=sizes.is_deterministic), unit, torch.inference_mode():
        cases = cases_of(operation, sizes, CPU)
        for case in cases:
            case()
    return len(cases)


def do_nothing(*_: object, **__: object) -> None:
    """A kernel that leaves its output as it was."""


SLOW = ["linear", "paged_attention", "sample"]
"""To interpret. Random batches of each are in the fast suite of their kernels."""

FAST = sorted(OPERATIONS.keys() - {HOPPER_PREFILL, *SLOW})


class TestGivenKernelsThatWork:
    # That for Hopper has cases on such a GPU alone.
    @pytest.mark.parametrize("operation", fast_only(FAST, SLOW))
    def test_when_they_are_tried_then_each_passes(self, operation: str) -> None:
        assert try_all(operation, SIZES) > 0

    @pytest.mark.parametrize("operation", fast_only(["copy_blocks", "write_kv"], ["paged_attention"]))
    def test_when_the_cache_is_in_fp8_then_each_passes(self, operation: str) -> None:
        assert try_all(operation, replace(SIZES, cache="fp8")) > 0

    @pytest.mark.parametrize("operation", ["gated_activation", "rms_norm", "write_kv"])
    def test_when_the_model_has_few_switches_then_each_passes(self, operation: str) -> None:
        plain = replace(SIZES, activation="silu", has_head_norm=False, has_post_norms=False, norm_offset=0.0)

        assert try_all(operation, plain) > 0

    def test_when_norms_subtract_the_mean_or_are_left_out_then_each_passes(self) -> None:
        parallel = replace(SIZES, is_norm_centered=True, is_parallel=True, has_post_norms=False, norm_offset=0.0)

        assert try_all("rms_norm", parallel) == 3
        assert try_all("rms_norm", replace(SIZES, has_pre_norms=False)) == 3

    @pytest.mark.long
    @pytest.mark.parametrize("operation", ["experts", *SLOW])
    def test_when_results_must_not_depend_on_the_batch_then_each_passes(self, operation: str) -> None:
        whole = replace(SIZES, is_deterministic=True, is_int8=False, sliding_windows=(0,))

        assert try_all(operation, whole) > 0

    @pytest.mark.long
    @pytest.mark.parametrize("form", PACKED)
    @pytest.mark.parametrize("is_deterministic", [False, True])
    def test_when_weights_are_packed_then_each_product_passes(self, form: WordForm, *, is_deterministic: bool) -> None:
        # One product of each kind is enough: they take long.
        packed = replace(
            SIZES,
            hidden_size=64,
            intermediate_size=128,
            is_int8=False,
            word_forms=(form,),
            is_deterministic=is_deterministic,
            mixture=None,
        )

        assert try_all("linear", packed) > 0

    def test_when_the_model_caps_no_logits_then_there_is_nothing_to_try(self) -> None:
        assert try_all("soft_cap", replace(SIZES, final_soft_cap=0.0)) == 0


BROKEN = {
    "copy_blocks": "copy_blocks.kernel.copy_blocks_triton",
    "gated_activation": "gated_activation.kernel.gated_activation_triton",
    "linear": "linear.kernel.int8_product_triton",
    "paged_attention": "paged_attention.kernel.paged_attention_triton",
    "penalties": "penalties.kernel.apply_penalties_triton",
    "token_masks": "token_masks.kernel.apply_token_masks_triton",
    "rms_norm": "rms_norm.kernel.rms_norm_triton",
    "sample": "sample.kernel.sample_triton",
    "soft_cap": "soft_cap.kernel.soft_cap_triton",
    "write_kv": "write_kv.kernel.write_kv_triton",
}


class TestGivenAKernelThatDoesNothing:
    @pytest.mark.parametrize("operation", BROKEN)
    def test_when_it_is_tried_then_its_result_is_wrong(self, operation: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"sluice.kernels.{BROKEN[operation]}", do_nothing)
            # What is not written is not what it was by chance.
            patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
            with pytest.raises(WrongResult, match="its reference"):
                try_all(operation, SIZES)

    def test_when_a_row_has_other_bits_among_others_then_its_result_is_wrong(self) -> None:
        alone, among_others = torch.ones(1, 3), torch.ones(5, 3)
        among_others[0, 2] += 2.0**-23

        with pytest.raises(WrongResult, match="a row of 1 is not bitwise identical to the same row of 5"):
            require_same_rows([alone, among_others])


def test_allocation_is_as_on_a_gpu() -> None:
    with triton_in_place_of_cpu():
        from sluice.kernels.trial.cache_cases import make_cache

        assert make_cache(SIZES, 2, CPU).layout is layout.Layout.PLAIN
