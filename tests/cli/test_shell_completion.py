"""What bash, zsh and fish themselves make of the completion scripts; `tests/packages.sh` brings the shells."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import Client, JobRequest
from tests.cli.programs import environ

WITHIN_S = 60.0
TERMINALS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "set -o emacs"),
    "zsh": (["zsh", "-f", "-i"], "bindkey -e; autoload -Uz compinit; compinit -u -D"),
}
SHOW = "gpulease --show-completion"
PROGRAM = """#!{}
import sys
from gpulease_cli import id_completion, main
id_completion.ANSWER_S = 30.0
sys.exit(main())
"""
CASES = [
    ("expl", "explain"),
    ("submit --launcher=torchr", "submit --launcher=torchrun"),
    ("submit --launcher acc", "submit --launcher accelerate"),
    ("gpu cordon {node}", "gpu cordon {node}:"),
    ("logs whole", "logs whole-words"),
]
"""What is typed before Tab, and what is on the line then."""


@pytest.fixture
def environment(url: str, tmp_path: Path) -> dict[str, str]:
    """A user's own, with the program on PATH. It waits longer for a daemon on a busy machine."""
    program = tmp_path / "bin" / "gpulease"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(sys.executable))
    program.chmod(0o755)
    return environ(GPULEASE_URL=url, HOME=str(tmp_path), TERM="dumb", PATH=f"{program.parent}:{os.environ['PATH']}")


@pytest.fixture
def node(client: Client) -> Iterator[str]:
    """The name of the node, while there is a job that is called `whole-words`."""
    job = client.submit(JobRequest(command=["true"], launcher="plain", name="whole-words"))
    yield client.nodes()[0].name
    client.wait_job(job.id, 60)


def typed(terminal: int, text: str, expected: str) -> None:
    """Type `text`, and wait until `expected` is printed."""
    os.write(terminal, text.encode())
    printed, until_s = "", time.monotonic() + WITHIN_S
    while expected not in printed:
        left_s = until_s - time.monotonic()
        assert select.select([terminal], [], [], max(0.0, left_s))[0], f"{expected!r} is not in {printed!r}"
        printed += os.read(terminal, 65536).decode(errors="replace")


@pytest.mark.budget(20)
@pytest.mark.parametrize("shell", TERMINALS)
def test_tab_completes_what_was_typed(shell: str, node: str, environment: dict[str, str]) -> None:
    words, beginning = TERMINALS[shell]
    ours, theirs = pty.openpty()
    at_terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    program = subprocess.Popen(words, env=environment | {"SHELL": shell}, **at_terminal)  # type: ignore[call-overload]
    os.close(theirs)
    try:
        typed(ours, f'{beginning}; eval "$({SHOW})"; echo $((40 + 2))\n', "42")
        for before, after in CASES:
            line = after.format(node=node).replace(" ", "><")
            # Ctrl-A goes to the beginning of the line, which then is printed word by word.
            typed(ours, f"gpulease {before.format(node=node)}\t\x01printf '<%s>' \x05\n", f"<gpulease><{line}>")
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def test_bash_completes_what_follows_a_colon(node: str, environment: dict[str, str]) -> None:
    line = f"gpulease gpu cordon {node}:"
    asked = (
        f'eval "$({SHOW})"; COMP_WORDBREAKS=" :"; COMP_LINE="{line}"; COMP_POINT={len(line)}; compopt() {{ :; }};'
        ' _gpulease_completion gpulease; echo "${COMPREPLY[@]}"; COMPREPLY=(); COMP_WORDBREAKS=" ";'
        ' _gpulease_completion gpulease; echo "${COMPREPLY[@]}"'
    )
    command = ["bash", "--norc", "-c", asked]
    done = subprocess.run(command, env=environment | {"SHELL": "bash"}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 1 2 3", " ".join(f"{node}:{index}" for index in range(4))]


@pytest.mark.parametrize(("before", "after"), [*CASES, ("gpu cordon {node}:3", "gpu cordon {node}:3")])
def test_fish_offers_words_with_what_they_are(before: str, after: str, node: str, environment: dict[str, str]) -> None:
    asked = f'{SHOW} | source; complete -C "gpulease {before.format(node=node)}"'
    command = ["fish", "--no-config", "-c", asked]
    done = subprocess.run(command, env=environment | {"SHELL": "fish"}, capture_output=True, text=True, check=True)
    offered = [line.split("\t")[0] for line in done.stdout.splitlines()]
    last = after.format(node=node).split()[-1]
    assert [word for word in offered if word.startswith(last)], done.stderr


def test_a_completion_that_cannot_be_installed_says_what_to_do(tmp_path: Path) -> None:
    """It was a traceback, as for a user whose home directory does not exist."""
    (tmp_path / "file").touch()
    words = [sys.executable, "-m", "gpulease_cli", "--install-completion"]
    own = {name: value for name, value in environ().items() if name != "XDG_DATA_HOME"}
    done = subprocess.run(
        words, env=own | {"SHELL": "bash", "HOME": str(tmp_path / "file")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "why: The completion script was not written: " in done.stderr
    assert "do:  Set XDG_DATA_HOME to a directory of your own, or keep what" in done.stderr
