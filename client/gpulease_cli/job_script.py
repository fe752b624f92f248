"""Options of `gpulease submit` in the script itself, as sbatch reads `#SBATCH` lines:

```sh
#!/bin/bash
#GPULEASE -n 2 --time 1h
python train.py
```

They are in the comments at the head of the script. Options on the command line take precedence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from gpulease_cli.help_format import Command

HEAD_BYTES = 65536
"""Of a script that are read."""
MARKED = "gpulease.words_marked"
"""In `ctx.meta`: whether `--` stands before the script."""
MODULE = "-m"
_LINE = re.compile(r"#GPULEASE(?:\s+(.*))?")


class OptionLine(NamedTuple):
    """One line of options."""

    number: int
    """Its number in the file, from 1."""
    words: list[str]


class ScriptCommand(Command):
    """A command that also takes options from the script that it is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of the script, then those that were typed."""
        if not ctx.resilient_parsing:
            args = self._marked_module(ctx, args)
            words = _words(self.make_parser(ctx).parse_args(list(args))[0])
            ctx.meta[MARKED] = len(args) > len(words) and args[-len(words) - 1] == "--"
            if words:
                args = [*self._options_of(ctx, Path(words[0])), *args]
        return super().parse_args(ctx, args)

    def _marked_module(self, ctx: click.Context, args: list[str]) -> list[str]:
        """With `--` before `-m MODULE`, as people write it after `python`: it is no option of this command."""
        try:
            self.make_parser(ctx).parse_args(list(args))
        except click.NoSuchOption as error:
            if error.option_name == MODULE:
                at = args.index(MODULE)
                return [*args[:at], "--", *args[at:]]
            raise
        return args

    def _options_of(self, ctx: click.Context, script: Path) -> Iterator[str]:
        for line in option_lines(script):
            try:
                self._check_line(ctx, line.words)
            except click.UsageError as error:
                raise click.UsageError(f"{script}, line {line.number}: {error.format_message()}", ctx) from error
            yield from line.words

    def _check_line(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Raise UsageError unless these are options of this command, with values that they take."""
        values, others, _ = self.make_parser(ctx).parse_args(list(words))
        others = [*others, *_words(values)]
        if others:
            raise click.UsageError(f"{others[0]!r} is not an option.", ctx)
        for parameter in self.get_params(ctx):
            value: Any = values.get(parameter.name or "")
            if value is not None and isinstance(parameter, click.Option):
                if not parameter.expose_value:
                    raise click.UsageError(f"{parameter.opts[0]} cannot be set in a script.", ctx)
                parameter.type_cast_value(ctx, value)


def _words(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of the command, of what click's parser has found; empty where there are none."""
    words = values.get("words")
    return tuple(words) if isinstance(words, (tuple, list)) else ()


def option_lines(script: Path) -> Iterator[OptionLine]:
    """The lines of options at the head of a script; none for what is no text file. Raises click.UsageError for a line
    that cannot be split into words."""
    try:
        with script.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return
    if b"\0" in head:
        return
    for number, line in enumerate(head.decode(errors="replace").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            return
        if found := _LINE.fullmatch(line.rstrip()):
            try:
                yield OptionLine(number, shlex.split(found[1] or "", comments=True))
            except ValueError as error:
                raise click.UsageError(f"{script}, line {number}: {error}: {line}") from error
