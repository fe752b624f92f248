"""What of a job's log reaches the terminal."""

from __future__ import annotations

import pytest

from gpulease_cli.log_colors import TerminalLog


def shown(*pieces: str, prefixed: bool = False, coloured: bool = True) -> str:
    view = TerminalLog(prefixed, coloured)
    return "".join(view.show(piece) for piece in pieces)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain\ttext\r\n", "plain\ttext\r\n"),
        ("\r 50%\r100%", "\r 50%\r100%"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[38;2;1;2;3mx\x1b[38:5:7my", "\x1b[38;2;1;2;3mx\x1b[38:5:7my"),
        ("a\x1b[2Jb\x1b[10;10Hc\x1b[?1049hd\x1b[1Ae", "abcde"),
        ("a\x1b]0;title\x07b\x1b]52;c;aGk=\x1b\\c", "abc"),
        ("a\x1bP+q544e\x1b\\b\x1b_G\x1b\\c", "abc"),
        ("a\x1bcb\x1b(0c\x1b=d", "abcd"),
        ("a\x07b\x08c\x00d\x7fe\x0bf", "abcdef"),
        ("a\x9b2Jb\x9d0;t\x9cc\x85d", "abcd"),
        ("a\x1b[6nb\x1b[5mc", "ab\x1b[5mc"),
        ("ö \U0001f600 ▏▎▍", "ö \U0001f600 ▏▎▍"),
    ],
)
def test_colors_and_progress_bars_pass_and_control_sequences_do_not(text: str, left: str) -> None:
    assert shown(text) == left
    assert shown(*text) == left, "it is another thing when it comes letter by letter"


def test_an_endless_escape_sequence_is_held_back_only_to_a_bound() -> None:
    assert "visible" in shown("\x1b]0;" + "x" * 5000, "visible")


def test_rank_prefixes_are_colored_and_a_ranks_colors_end_with_its_line() -> None:
    text = shown("[rank 0] a\n[rank 1] \x1b[31mb\n", "[launcher] c\n", prefixed=True)
    assert text.startswith("\x1b[36m[rank 0]\x1b[0m a")
    assert "\x1b[33m[rank 1]\x1b[0m \x1b[31mb\x1b[0m\n" in text
    assert "\x1b[2m[launcher]\x1b[0m c" in text
    assert shown("[rank 0] a\n", prefixed=True, coloured=False) == "[rank 0] a\n"
    assert shown("[rank 0] a\n") == "[rank 0] a\n"
