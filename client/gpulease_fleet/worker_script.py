"""The shell script of a pilot: keeps a worker running in an allocation, and has it leave when it is told to."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

LOOP = """
left= restarts=0
trap 'left=1; kill -TERM "$worker" 2>/dev/null' TERM
while :; do
    began=$(date +%s)
    "$@" &
    worker=$!
    # Told to leave just before: that signal was for the one that had ended.
    [ -n "$left" ] && kill -TERM "$worker" 2>/dev/null
    while kill -0 "$worker" 2>/dev/null; do wait "$worker"; code=$?; done
    # 0: it has left. Otherwise it was killed, and its jobs run on: the next one finds them again.
    [ "$code" = 0 ] && exit 0
    [ -n "$left" ] && exit "$code"
    [ $(($(date +%s) - began)) -gt 60 ] && restarts=0
    restarts=$((restarts + 1))
    echo "the worker has ended with $code; start $restarts of 10"
    [ "$restarts" -ge 10 ] && exit "$code"
    sleep "$restarts" & wait $!
    [ -n "$left" ] && exit "$code"
done
"""


def worker_script(
    *,
    program: str,
    url: str,
    token: str,
    directory: str,
    node: str,
    allocation: str,
    leave_s: float,
    options: Sequence[str],
) -> str:
    """The script. In `node` and `allocation` the shell replaces variables; everything else is taken as it is."""
    worker = [
        shlex.quote(program),
        "worker",
        f"--url={shlex.quote(url)}",
        f'--node="{node}"',
        f'--data-dir={shlex.quote(directory)}/"{node}"',
        f'--allocation="{allocation}"',
        f"--leave-s={leave_s:g}",
        *map(shlex.quote, options),
    ]
    token_line = f"export GPULEASE_TOKEN={shlex.quote(token)}"
    return "\n".join(["umask 077", token_line, f"set -- {' '.join(worker)}", LOOP.lstrip("\n")])


def default_directory(pool: str) -> Path:
    """Where the logs of a pool's pilots and the data of its workers are, unless said otherwise."""
    return Path.home() / ".local/share/gpulease/fleet" / pool
