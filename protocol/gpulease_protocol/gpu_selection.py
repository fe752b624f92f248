"""Commands that choose GPUs themselves, and so take others than those of their lease.

The mask of a lease is the only thing that binds a program to its GPUs. An assignment inside the command replaces it,
and so do options of some launchers. What a script does cannot be seen here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

MASK = "CUDA_VISIBLE_DEVICES"
SELECTING_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": ("--num_gpus", "--num_nodes", "--include", "--exclude", "--hostfile", "-i", "-e", "-H"),
    "accelerate": ("--gpu_ids", "--gpu-ids"),
}
"""By launcher, its own options for choosing GPUs. With any of them deepspeed takes physical GPUs from 0 on, and
accelerate sets the mask itself, whatever is leased."""
ALIASES = {"ds": "deepspeed"}
SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh"))
PREFIXES = frozenset("exec nohup time setsid command export if then elif else while do ! {".split())  # noqa: SIM905
"""What may stand before a command in a shell."""
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
NAMES_GPUS = re.compile(r"[0-9]|GPU-|MIG-")
"""The beginning of a mask that names GPUs; an empty one hides all, and `$1` may be a part of the lease's own."""
SHELL_COMMAND = re.compile(r"-[a-z]*c")
SEPARATORS = ";&|()\n"
PYTHON = re.compile(r"python[0-9.]*t?")
RUN_OPTION = re.compile(r"-[bBdEiIOPqRsSuvx]*([mc])(.*)", re.DOTALL)
"""Options of Python, of which the last names the module or code to run, in the same word or the next."""
OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""Options of Python that take a separate word."""
DEPTH = 4
"""How many programs may start the next one."""


def outside_the_lease(command: Sequence[str], depth: int = DEPTH) -> str | None:
    """What in a command would take GPUs outside the lease, and what to do; None where nothing shows it.

    Looks through `env`, `sh -c` and what may stand before a command, at the words alone.
    """
    words = list(command)
    while words and (found := ASSIGNMENT.fullmatch(words[0])):
        if found[1] == MASK and NAMES_GPUS.match(found[2]):
            return f"{words[0]} would take GPUs outside the lease; leave it out, the lease sets it"
        words.pop(0)
    if not words or not depth:
        return None
    name = PurePath(words[0]).name
    if name in PREFIXES:
        return outside_the_lease(words[1:], depth - 1)
    if name == "env":
        return outside_the_lease(list(_after_options_of_env(words[1:])), depth - 1)
    if name in SHELLS:
        found_in = (outside_the_lease(one, depth - 1) for one in _shell_commands(words[1:]))
        return next(filter(None, found_in), None)
    return _selecting_option(words)


def program_name(command: Sequence[str]) -> str:
    """Name of the program that a command runs; of one that Python runs the script's, or the outermost module's."""
    name = PurePath(command[0]).name
    if not PYTHON.fullmatch(name):
        return name
    words = iter(command[1:])
    for word in words:
        if (ending := RUN_OPTION.fullmatch(word)) is not None:
            return (ending[2] or next(words, "")).partition(".")[0] if ending[1] == "m" else ""
        if not word.startswith("-") or word == "-":
            return PurePath(word).name
        if word in OPTIONS_WITH_VALUE:
            next(words, None)
    return ""


def _selecting_option(words: Sequence[str]) -> str | None:
    """The same for the options of a launcher: those before its script."""
    name = program_name(words)
    launcher = ALIASES.get(name, name)
    options = SELECTING_OPTIONS.get(launcher, ())
    starts_modules = name == PurePath(words[0]).name  # else -m is Python's
    for word, after in zip(words[1:], [*words[2:], ""], strict=False):
        if word.endswith(".py") or (word in ("--module", "-m") and starts_modules):
            return None
        option, _, value = word.partition("=")
        if option in options and (launcher, value or after) != ("accelerate", "all"):
            outside = f"{launcher} {option} would take GPUs outside the lease"
            return f"{outside}; leave it out, the launcher is given those leased"
    return None


def _after_options_of_env(words: Sequence[str]) -> Iterator[str]:
    """The assignments and the command of `env`, without its own options."""
    rest = iter(words)
    for word in rest:
        if word in ("-u", "--unset", "-C", "--chdir"):
            next(rest, None)
        elif not word.startswith("-"):
            yield word
            break
    yield from rest


def _shell_commands(words: Sequence[str]) -> Iterator[list[str]]:
    """The simple commands in the text of `sh -c TEXT`; none where it is a script, or cannot be read."""
    import shlex  # noqa: PLC0415 - for such commands only

    text = next((after for word, after in itertools.pairwise(words) if SHELL_COMMAND.fullmatch(word)), "")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    command: list[str] = []
    try:
        for word in lexer:
            if word.strip(SEPARATORS):
                command.append(word)
                continue
            yield command
            command = []
    except ValueError:  # a quote that is not closed, a here-document
        return
    yield command
