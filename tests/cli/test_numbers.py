"""Impossible numbers are refused in options, variables and files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_cli import main, output, settings
from gpulease_cli.option_types import Duration, Field, NodeRange, Number
from gpulease_cli.program import PROGRAM
from gpulease_protocol.host import config_file
from gpulease_protocol.host.config_file import ConfigurationRefused
from gpulease_protocol.reservations import MAX_RESERVED_GPUS


def commands(command: Any = PROGRAM, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, with its path."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *words, name)


def number_type(option: Any) -> Any:
    return option.type.base if isinstance(option.type, Field) else option.type


NUMBERS = [
    pytest.param(words, option, id=f"{' '.join(words)} {option.opts[0]}")
    for words, command in commands()
    for option in command.params
    if isinstance(number_type(option), Number | Duration)
]
SETTINGS = [
    pytest.param(section, option, id=f"{section} {key}")
    for section in ("serve", "worker")
    for key, option in settings.declared(PROGRAM, section).items()
    if isinstance(option.type, Number)
]
REQUIRED = {
    "run": ("--", "true"),
    "submit": ("--", "train.py"),
    "logs": ("job-82c4b92c1f47e880",),
    "cancel": ("job-82c4b92c1f47e880",),
    "renew": ("lease-6434526eb94cfb23",),
    "release": ("lease-6434526eb94cfb23",),
    "keep": ("lease-6434526eb94cfb23", "--reason", "x"),
    "token create": ("--user", "ada"),
}
"""Required arguments of commands, after their options."""
OF_THE_REQUEST = {
    "gpus": (1, 4096),
    "nodes": (1, 256),
    "retries": (0, 100),
    "max_restarts": (0, 100),
    "count": (1, MAX_RESERVED_GPUS),
}
"""Numbers with bounds in the request body, for the library and the command line alike."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine, and no daemon: mistakes are refused before any request."""
    for name in [name for name in os.environ if name.startswith("GPULEASE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(config_file, "SYSTEM", tmp_path / "none.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GPULEASE_URL", "http://127.0.0.1:9")


def impossible(option: Any) -> list[str]:
    """Texts that this option must refuse."""
    if isinstance(number_type(option), Duration):
        return ["nan", "inf", "-1", "9" * 400, "99999999999d"]
    kind = number_type(option)
    own = kind.minimum, kind.maximum
    least, most = OF_THE_REQUEST[option.name] if own == (None, None) else own
    assert least is not None, f"{option.opts[0]} has no least value"
    assert most is not None, f"{option.opts[0]} has no greatest value"
    below, above = least - 1, most * 2 + 1
    return ["nan", "-inf", "1e400", "1e-320", str(below), str(above)]


@pytest.mark.parametrize(("words", "option"), NUMBERS)
def test_an_option_refuses_impossible_numbers(
    words: tuple[str, ...], option: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in impossible(option):
        asked = [*words, f"{option.opts[-1]}={text}", *REQUIRED.get(" ".join(words), ())]
        assert main(asked) == output.USAGE, asked
        said = capsys.readouterr().err
        assert option.opts[-1] in said, asked
        assert "  do:  " in said


@pytest.mark.parametrize(("section", "option"), SETTINGS)
def test_variables_and_files_refuse_impossible_numbers(
    section: str, option: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in impossible(option):
        monkeypatch.setenv(option.envvar, text)
        assert main([section]) == output.USAGE, text
        assert "  do:  " in capsys.readouterr().err
        monkeypatch.delenv(option.envvar)

        file = tmp_path / "config.toml"
        file.write_text(f"[{section}]\n{option.name} = {text}\n")
        with pytest.raises(ConfigurationRefused, match=f"{option.name} in"):
            settings.check(PROGRAM, config_file.read(file))


@pytest.mark.parametrize("text", ["1:3", "3:2", "2:", ":3", "2:x", "2:3:4", "0", "2:257"])
def test_a_range_of_nodes_that_means_nothing_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--nodes", text, "--", "train.py"]) == output.USAGE
    assert "--nodes" in capsys.readouterr().err


def test_a_range_of_nodes_is_the_fewest_and_the_most() -> None:
    assert NodeRange().convert("2:4", None, None) == (2, 4)
    assert NodeRange().convert("2", None, None) == (2, None)
