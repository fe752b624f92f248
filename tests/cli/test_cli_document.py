"""docs/cli.md against the program: it has every command and variable, and its examples work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from gpulease_cli import output
from gpulease_cli.command_groups import summary
from gpulease_cli.command_table import COMMANDS
from gpulease_cli.commands import run
from gpulease_cli.global_options import GLOBAL_OPTIONS
from gpulease_cli.installed_commands import entry_points
from gpulease_cli.program import PROGRAM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()
INTERNAL = "gpulease also sets"


def commands(group: Any = PROGRAM, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that is no group, with its path."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def examples() -> list[list[str]]:
    """The words of every example, without the program's name, a shell's `eval` and the remark."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line]
    lines += [shlex.split(line) for _, command in commands() for line in command.examples]
    said = [shlex.split(words[1][2:-1]) if words[0] == "eval" else words for words in lines]
    assert {words[0] for words in said} == {"gpulease"}
    return [words[1:] for words in said]


def path_of(words: list[str]) -> tuple[str, ...]:
    if words[0] == "fleet":
        return tuple(words[:3])
    groups = ("config", "db", "node", "gpu", "token", "limits", "reservations", "policy")
    return tuple(words[:2]) if words[0] in groups else tuple(words[:1])


@pytest.mark.parametrize("path", [path for path, _ in commands()], ids=" ".join)
def test_the_help_of_a_command_ends_with_examples_of_this_command(path: tuple[str, ...]) -> None:
    command = dict(commands())[path]
    shown = command.get_help(command.make_context(path[-1], [], resilient_parsing=True)).split("\nExamples:\n")[1]
    assert shown.strip()
    assert all(f"gpulease {' '.join(path)}" in line for line in shown.splitlines())


@pytest.mark.parametrize("words", examples(), ids=" ".join)
def test_an_example_parses(words: list[str]) -> None:
    path = path_of(words)
    dict(commands())[path].make_context("gpulease", words[len(path) :])  # raises what the program would complain of


def test_every_command_has_an_example() -> None:
    assert {path_of(words) for words in examples()} == {path for path, _ in commands()}


@pytest.mark.parametrize("path", [path for path, _ in commands()], ids=" ".join)
def test_the_help_shows_whole_brackets_and_no_type_of_python(path: tuple[str, ...]) -> None:
    command = dict(commands())[path]
    help_text = command.get_help(command.make_context(path[-1], [], resilient_parsing=True))
    assert help_text.count("[") == help_text.count("]"), help_text
    assert not re.search(r"<|[0-9]<=|list\[|Optional|Union", help_text)


def test_the_options_of_the_program_may_follow_every_command() -> None:
    """Except where a command has one of that name for itself."""
    own = {(("renew",), "--token"), (("release",), "--token"), (("keep",), "--token"), (("worker",), "--url")}
    for path, command in commands():
        parameters = command.get_params(command.make_context(path[-1], [], resilient_parsing=True))
        assert len({one.name for one in parameters}) == len(parameters), "two of one name overwrite each other"
        left_out = {(path, one.opts[0]) for one in GLOBAL_OPTIONS if one not in parameters}
        assert left_out <= own


WITHOUT_JSON = {
    ("serve",): "it logs, and the log may be JSON",
    ("mcp",): "it speaks to a program, in JSON",
    ("worker",): "it logs, and the log may be JSON",
    ("setup",): "it asks before it does anything",
    ("node", "add"): "its result is a command",
    ("node", "join"): "its result are the files that it writes",
    ("run",): "what it prints is the command's own",
    ("shell",): "the same",
    ("logs",): "what it prints is the job's own",
    ("top",): "it draws on a terminal",
    ("db", "upgrade"): "it prints nothing",
    ("fleet", "slurm", "up"): "it logs",
    ("fleet", "slurm", "down"): "it logs",
    ("fleet", "ray", "up"): "it logs",
    ("fleet", "ray", "down"): "it logs",
    ("db", "backup"): "its result is the file that it creates",
    ("config", "check"): "its result is the exit code, and the error that names the line",
}
"""Why these need no `--json`."""


def test_every_command_that_prints_a_result_has_json() -> None:
    without = {path for path, command in commands() if not any("--json" in option.opts for option in command.params)}
    assert without == set(WITHOUT_JSON)


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| ([0-9]+(?:, [0-9]+)*) \|", PAGE, re.MULTILINE)
    codes = {int(code) for row in rows for code in row.split(", ")}
    own = {run.NOT_NOW, run.FAILED, run.NOT_EXECUTABLE, run.NOT_FOUND}
    assert codes == {output.DONE, output.REFUSED, output.USAGE, output.UNREACHABLE, output.LOST} | own


def test_exactly_the_variables_that_exist_are_documented() -> None:
    of_options = {
        variable
        for _, command in commands()
        for option in command.params
        for variable in ([option.envvar] if isinstance(option.envvar, str) else option.envvar or [])
    }
    sources = "".join(
        path.read_text() for part in ("protocol", "client", "worker", "server") for path in (ROOT / part).rglob("*.py")
    )
    in_code = set(re.findall(r"\bGPULEASE_[A-Z_]*[A-Z]\b", sources)) | of_options
    assert set(re.findall(r"`(GPULEASE_[A-Z_]+)`", PAGE)) == in_code


def test_the_table_has_only_variables_for_users() -> None:
    table, internal = PAGE.split(INTERNAL)
    assert "`GPULEASE_URL`" in table
    assert "GPULEASE_PARENT_PID" in internal
    assert "GPULEASE_PARENT_PID" not in table


@pytest.mark.parametrize("path", [path for path, _ in commands()], ids=" ".join)
def test_the_summary_in_the_list_of_commands_is_that_of_the_command(path: tuple[str, ...]) -> None:
    rows = COMMANDS
    for name in path:
        row = rows.get(name)
        if row is None:  # of a group that a package brings along
            return
        rows = dict(row.below)
    assert row.summary == summary(dict(commands())[path])


def test_the_help_lists_every_command_under_a_subject() -> None:
    context = PROGRAM.make_context("gpulease", [], resilient_parsing=True)
    shown = PROGRAM.get_help(context)
    assert [line for line in shown.splitlines() if line.startswith(("Commands:", "More:"))] == []
    for name in PROGRAM.commands:
        assert re.search(rf"^  {name}  ", shown, re.MULTILINE), name
    assert not [name for name in entry_points() if name not in PROGRAM.commands]
    heads = re.findall(r"^## (.*)$", PAGE.split("## Exit codes")[0], re.MULTILINE)
    assert [line.rstrip(":") for line in shown.splitlines() if line.rstrip(":") in heads] == heads
