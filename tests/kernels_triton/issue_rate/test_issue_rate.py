"""Kernels that wait for memory must not wait for their instructions instead: counted in what Hopper's compiler made."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import pytest
import torch

from sluice.kernels.linear.few_rows import few_rows_triton
from sluice.kernels.linear.float8_row import float8_row_triton
from sluice.kernels.linear.kernel import int8_product_triton
from sluice.kernels.linear.word_row import word_row_triton
from tests.grids import fast_only
from tests.kernels_triton.compiler import CUOBJDUMP, Compiled, CompileInstead
from tests.kernels_triton.issue_rate.machine_code import Loop, bulk_loop
from tests.kernels_triton.test_compiled_kernels import (
    WORDS,
    compile_attention,
    compile_invariant_attention,
    compile_invariant_product,
    float8_of,
    words_of,
)

RUNS_COMPILED = True

ISSUE_LIMIT = 132 * 4 * 1.98e9 / (4274e9 / 1024)
"""Instructions that an H200 issues while it copies 1,024 bytes: processors times schedulers times clock, over copy."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton has no NVIDIA compiler"),
    pytest.mark.filterwarnings("default"),  # a compiler's advice is not an error of ours
]


def check_waits_for_memory(compiled: Compiled, *, share: float = 0.6) -> None:
    """At most `share` of the limit: warps stall, so no scheduler issues in every cycle."""
    loop = bulk_loop(compiled.cubin)
    assert loop.num_bytes >= 2048, loop
    assert loop.instructions_per_kb <= share * ISSUE_LIMIT, loop


class TestGivenAKernelThatReadsMuch:
    @pytest.mark.parametrize(
        ("head_size", "is_fp8"), fast_only([(128, False)], [(64, False), (256, False), (128, True), (256, True)])
    )
    def test_when_a_decode_is_compiled_then_it_waits_for_memory(self, head_size: int, *, is_fp8: bool) -> None:
        attended, _ = compile_attention(
            torch.bfloat16, head_size=head_size, max_query_len=1, max_context_len=9000, is_fp8=is_fp8
        )

        check_waits_for_memory(attended)

    @pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.6), (torch.int8, 0.85)], ids=str)
    def test_when_a_product_of_one_row_is_compiled_then_it_waits_for_memory(
        self, dtype: torch.dtype, share: float
    ) -> None:
        x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(1024, 4096, dtype=dtype)
        scales = torch.zeros(1024) if dtype == torch.int8 else None

        with CompileInstead() as compiled:
            few_rows_triton(x, weight, scales, None, out=torch.zeros(1, 1024, dtype=torch.bfloat16))

        check_waits_for_memory(compiled[0], share=share)

    @pytest.mark.parametrize(("num_bits", "span", "dtype"), fast_only(WORDS[:1], WORDS[1:]))
    def test_when_a_product_of_one_packed_row_is_compiled_then_it_waits_for_memory(
        self, num_bits: int, span: int, dtype: torch.dtype
    ) -> None:
        x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), words_of(28_672, 4096, num_bits, span, dtype)

        with CompileInstead() as compiled:
            out = torch.zeros(1, dtype=torch.bfloat16).expand(1, 28_672)
            word_row_triton(x, weight, None, out=out)

        loop = bulk_loop(compiled[0].cubin)
        # Scales and minimums are streamed, too.
        all_bytes = loop.num_bytes * weight.num_bytes / (weight.codes.numel() * 4)
        assert 1024 * loop.num_instructions / all_bytes <= 0.95 * ISSUE_LIMIT

    @pytest.mark.long
    @pytest.mark.parametrize("span", [0, 128])
    def test_when_a_product_of_one_row_in_fp8_is_compiled_then_it_waits_for_memory(self, span: int) -> None:
        x = torch.zeros(1, 4096, dtype=torch.bfloat16)

        with CompileInstead() as compiled:
            out = torch.zeros(1, 28_672, dtype=torch.bfloat16)
            float8_row_triton(x, float8_of(28_672, 4096, span), None, out=out)

        check_waits_for_memory(compiled[0])

    @pytest.mark.long
    @pytest.mark.parametrize("num_tokens", [16, 64])
    def test_when_a_product_in_int8_is_compiled_then_it_waits_for_memory(self, num_tokens: int) -> None:
        x, weight = torch.zeros(num_tokens, 4096, dtype=torch.bfloat16), torch.zeros(28_672, 4096, dtype=torch.int8)
        out = torch.zeros(num_tokens, 28_672, dtype=torch.bfloat16)

        with CompileInstead() as compiled:
            int8_product_triton(x, weight, torch.zeros(28_672), x[0, :1].expand(28_672), out=out)

        check_waits_for_memory(next(one for one in compiled if one.name == "_int8_product_kernel"))

    @pytest.mark.long
    @pytest.mark.parametrize(("out_size", "num_tokens"), [(4096, 1), (28_672, 64)])
    def test_when_an_invariant_product_is_compiled_then_it_waits_for_memory(
        self, out_size: int, num_tokens: int
    ) -> None:
        check_waits_for_memory(compile_invariant_product(out_size, 4096, num_tokens), share=0.2)

    @pytest.mark.long
    @pytest.mark.parametrize("head_size", [64, 128])
    def test_when_invariant_attention_is_compiled_then_it_waits_for_memory(self, head_size: int) -> None:
        attended, _ = compile_invariant_attention(torch.bfloat16, head_size=head_size, max_query_len=1)

        check_waits_for_memory(attended)


class TestGivenALoopOfTooManyInstructions:
    """So that the check can fail."""

    def test_when_it_takes_more_than_a_scheduler_issues_then_its_rate_says_so(self) -> None:
        assert Loop(num_instructions=700, num_bytes=4096).instructions_per_kb > 0.6 * ISSUE_LIMIT
        assert Loop(num_instructions=368, num_bytes=8448).instructions_per_kb < 0.6 * ISSUE_LIMIT
