"""Completion for bash, zsh and fish: `gpulease --show-completion` and `--install-completion`.

No file that a user writes is changed: bash and fish look for a completion script in a directory of its own, and for zsh
the line to add is printed.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class, shell_complete

from gpulease_protocol.errors import InvalidRequest

VARIABLE = "_GPULEASE_COMPLETE"
"""Set by the completion script of a shell when it asks for completions."""
SCRIPTS = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/gpulease"),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/gpulease.fish"),
}
"""Where a shell looks for the script: below this variable's directory, or else this one in the home directory."""
ZSH_LINE = 'eval "$(gpulease --show-completion)"'


def answer(program: click.Command) -> int:
    """Print the completions that the shell asks for in the environment, and return the exit code."""
    return shell_complete(program, {}, "gpulease", VARIABLE, os.environ[VARIABLE])


def show(program: click.Command) -> None:
    """Print the completion script of the current shell."""
    click.echo(_script(program, _shell()))


def install(program: click.Command) -> None:
    """Write the completion script where the current shell looks for it, and say where that is."""
    shell = _shell()
    if shell == "zsh":
        click.echo(f"Add this line to ~/.zshrc, after compinit, and start a new shell:\n  {ZSH_LINE}")
        return
    variable, below_home, name = SCRIPTS[shell]
    path = Path(os.environ.get(variable) or Path.home() / below_home) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_script(program, shell))
    note = " (needs the package bash-completion)" if shell == "bash" else ""
    click.echo(f"{path} completes gpulease in new shells{note}.")


def _shell() -> str:
    """The shell of the current user."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in ("bash", "zsh", "fish"):
        raise InvalidRequest(
            f"There is no completion for the shell {name!r}, which the variable SHELL names.",
            remedy="Set it to bash, zsh or fish: SHELL=bash gpulease --show-completion",
        )
    return name


def _script(program: click.Command, shell: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(program, {}, "gpulease", VARIABLE).source()
