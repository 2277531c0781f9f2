"""Which layers share a block table, and which share memory."""

from itertools import product

import pytest

from sluice.engine.execution.block_groups import block_groups


def windows(num_layers: int, period: int) -> list[int]:
    """All but the last of each `period` layers have a window."""
    return [512 if (layer + 1) % period else 0 for layer in range(num_layers)]


class TestGivenLayersWithAndWithoutAWindow:
    @pytest.mark.parametrize(
        ("num_layers", "period", "layers_per_block", "num_groups"),
        [(26, 6, 4, 6), (34, 6, 5, 6), (48, 6, 8, 5), (62, 6, 11, 5), (26, 2, 13, 1), (3, 2, 1, 2)],
    )
    def test_when_they_are_grouped_then_few_parts_of_blocks_are_unused(
        self, num_layers: int, period: int, layers_per_block: int, num_groups: int
    ) -> None:
        found = block_groups(windows(num_layers, period))

        assert (found.layers_per_block, found.num_window_groups) == (layers_per_block, num_groups)
        assert layers_per_block * (1 + num_groups) <= 1.1 * num_layers

    @pytest.mark.parametrize(("num_layers", "period"), list(product(range(2, 40), (2, 3, 6))))
    def test_when_they_are_grouped_then_none_shares_a_part_of_a_table(self, num_layers: int, period: int) -> None:
        found = block_groups(windows(num_layers, period))

        assert len(set(found.places)) == num_layers
        assert {place.table for place in found.places} == set(range(1 + found.num_window_groups))
        assert max(place.part for place in found.places) < found.layers_per_block
        if found.num_window_groups:
            is_windowed = [place.table > 0 for place in found.places]
            assert is_windowed == [window > 0 for window in windows(num_layers, period)]


class TestGivenLayersOfWhichFewOrAllHaveAWindow:
    @pytest.mark.parametrize("sliding_windows", [[0, 0, 0], [9, 9], [0, 0, 9], [0, 9, 8]])
    def test_when_they_are_grouped_then_they_are_one_group(self, sliding_windows: list[int]) -> None:
        found = block_groups(sliding_windows)

        assert (found.layers_per_block, found.num_window_groups) == (len(sliding_windows), 0)
        assert [place.part for place in found.places] == list(range(len(sliding_windows)))
