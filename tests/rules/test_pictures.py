"""The recorder of terminals: what a program prints is what the picture shows."""

import sys
from xml.etree import ElementTree

import pytest

from tools.pictures import animation
from tools.pictures.recording import Recording, record
from tools.pictures.screen import Screen


def lines_of(screen: Screen) -> list[str]:
    """The text of each line."""
    return ["".join(text for text, _ in screen.runs(row)) for row in range(len(screen.lines))]


class TestGivenAScreen:
    @pytest.mark.parametrize(
        ("output", "lines"),
        [
            ("one\r\ntwo\r\n", ["one", "two", ""]),
            ("10 %\r99 %\r\n", ["99 %", ""]),
            ("old\r\nnew\r\x1b[2K\x1b[1A\x1b[2Klive\r\n", ["live", ""]),
            ("\x1b[1mbold\x1b[0m plain   ", ["bold plain"]),
        ],
        ids=["lines", "overwritten", "erased", "styled"],
    )
    def test_when_a_program_prints_then_the_lines_match_a_terminal(self, output: str, lines: list[str]) -> None:
        screen = Screen()

        screen.feed(output)

        assert lines_of(screen) == lines

    def test_when_a_sequence_is_unknown_then_it_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="unknown control sequence"):
            Screen().feed("\x1b[5;5H")


class TestGivenAProgram:
    def test_when_it_is_recorded_then_its_output_is_whole(self) -> None:
        recording = record([sys.executable, "-c", "print('┏━┓\\n' * 2000)"], rows=24, columns=80)

        assert "".join(text for _, text in recording.output).split() == ["┏━┓"] * 2000

    def test_when_it_fails_then_nothing_is_recorded(self) -> None:
        with pytest.raises(SystemExit, match="no figures"):
            record([sys.executable, "-c", "raise SystemExit('no figures')"], rows=24, columns=80)


class TestGivenARecording:
    def test_when_it_is_drawn_then_each_content_of_a_line_is_in_it_once(self) -> None:
        output = ((0.1, "start\r\n"), (1.0, "10 %"), (2.0, "\r99 %"), (3.0, "\r\nend & <done>\r\n"))

        picture = ElementTree.fromstring(animation.draw(Recording(rows=3, columns=20, output=output), title="run"))

        texts = ["".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert sorted(texts) == sorted(["run", "start", "10 %", "99 %", "end & <done>"])
