"""Completion for bash, zsh and fish: `gpulease --show-completion` and `--install-completion`.

No file that a user writes is changed: bash and fish look for a completion script in a directory of its own, and for zsh
the line to add is printed.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    shell_complete,
    split_arg_string,
)

from gpulease_protocol.errors import InvalidRequest

VARIABLE = "_GPULEASE_COMPLETE"
"""Set by the completion script of a shell when it asks for completions."""
SCRIPTS = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/gpulease"),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/gpulease.fish"),
}
"""Where a shell looks for the script: below this variable's directory, or else this one in the home directory."""
ZSH_LINE = 'eval "$(gpulease --show-completion)"'
BASH_SCRIPT = """\
%(complete_func)s() {
    local IFS=$'\\n' line=${COMP_LINE:0:COMP_POINT} kept= completion type value
    local word=${line##*[[:space:]]}
    # To bash a word begins after a colon, as in gpubox:3. So what is before it stays on the line.
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && kept=${word%%"${word##*:}"}
    for completion in $(env COMP_WORDS="$line" %(complete_var)s=bash_complete $1); do
        IFS=',' read -r type value <<< "$completion"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$kept"}") ;;
        esac
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    """Completion for bash by the line that was typed: the words that bash makes of it end at each colon."""

    source_template = BASH_SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words of the line before the cursor, and the beginning of the last one."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1].isspace() else ""
        return words[1:], incomplete


class _WithOption(ShellComplete):
    """For shells that replace the whole word by what is offered: of `--option=value` both parts are offered."""

    _option = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to complete, and its beginning."""
        words, incomplete = super().get_completion_args()
        self._option = incomplete[: incomplete.find("=") + 1] if incomplete.startswith("-") else ""
        return words, incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        """What is printed for one item."""
        return super().format_completion(CompletionItem(self._option + item.value, item.type, item.help))


class _Zsh(_WithOption, ZshComplete):
    pass


class _Fish(_WithOption, FishComplete):
    pass


for kind in (_Bash, _Zsh, _Fish):
    add_completion_class(kind)


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
    try:
        path = Path(os.environ.get(variable) or Path.home() / below_home) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_script(program, shell))
    except (OSError, RuntimeError) as error:  # RuntimeError: no HOME, and the system does not know this user
        raise InvalidRequest(
            f"The completion script was not written: {error}.".replace("..", "."),
            remedy=f"Set {variable} to a directory of your own, or keep what `gpulease --show-completion` prints.",
        ) from None
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
