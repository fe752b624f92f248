"""What a job may be started with: its environment, its resource limits, and who is told of its end."""

from __future__ import annotations

import re

from gpulease_protocol.bounds import check_field
from gpulease_protocol.errors import shortened

MAX_VARIABLES = 4096
"""Variables of a job, at most."""
MAX_ENVIRONMENT_BYTES = 2**20
"""Size of a job's environment, at most; the kernel takes 2 MiB of arguments and environment together (execve(2))."""
MAX_ARGUMENT_BYTES = 2**17 - 1
"""Size of one variable or argument, at most: the kernel's MAX_ARG_STRLEN (execve(2))."""
RESOURCE_LIMITS = frozenset(
    (
        *("as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue"),
        *("nice", "nofile", "nproc", "rss", "rtprio", "rttime", "sigpending", "stack"),
    )
)
"""Names of resource limits, as in setrlimit(2)."""
NO_LIMIT = f"knows only {', '.join(sorted(RESOURCE_LIMITS))}"


def environment_bytes(environment: dict[str, str]) -> int:
    """How much memory the variables take when a process is started with them."""
    return sum(len(f"{name}={value}".encode(errors="surrogatepass")) + 1 for name, value in environment.items())


def check_environment(environment: dict[str, str], command: list[str]) -> None:
    """Raise ValueError unless a process can be started with these variables and this command."""
    check_field(
        len(environment) <= MAX_VARIABLES,
        "environment",
        f"must have at most {MAX_VARIABLES} variables, not {len(environment)}; leave out what the job does not need",
    )
    check_field(
        all(isinstance(word, str) for variable in environment.items() for word in variable),
        "environment",
        "names and values must be text",
    )
    check_field(
        all(name and "=" not in name and "\0" not in name + value for name, value in environment.items()),
        "environment",
        "names must not be empty or contain '=', and nothing may contain NUL",
    )
    sizes = {name: len(f"{name}={value}".encode(errors="surrogatepass")) + 1 for name, value in environment.items()}
    long = max(sizes, key=sizes.__getitem__, default="")
    check_field(
        not sizes or sizes[long] <= MAX_ARGUMENT_BYTES,
        "environment",
        f"no variable may be over {MAX_ARGUMENT_BYTES} bytes, and {shortened(long)!r} is {sizes.get(long)}; put it into"
        " a file",
    )
    size = sum(sizes.values())
    check_field(
        size <= MAX_ENVIRONMENT_BYTES,
        "environment",
        f"must be at most {MAX_ENVIRONMENT_BYTES} bytes (1 MiB), not {size}; leave out what the job does not need",
    )
    words = [len(word.encode(errors="surrogatepass")) + 1 for word in command]
    check_field(
        max(words) <= MAX_ARGUMENT_BYTES and sum(words) <= MAX_ENVIRONMENT_BYTES // 2,
        "command",
        f"no word may be over {MAX_ARGUMENT_BYTES} bytes, nor all over {MAX_ENVIRONMENT_BYTES // 2};"
        " put them into a file",
    )


def check_notify(notify: str | None) -> None:
    """Raise ValueError unless this is a URL that can be called, or can be a command."""
    scheme, separator, rest = (notify or "").partition("://")
    if separator and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        usable = is_notify_url(notify) and bool(re.fullmatch(r"[^\s/][^\s]*", rest))
        check_field(usable, "notify", "must be an http or https URL with a host, or a command")
    check_field("\0" not in (notify or ""), "notify", "must not contain NUL")


def is_notify_url(notify: str | None) -> bool:
    """True for a URL, false for a command."""
    return notify is not None and notify.lower().startswith(("http://", "https://"))


def check_resource_limits(limits: dict[str, list[int]]) -> None:
    """Raise ValueError unless these can be resource limits."""
    for name, pair in limits.items():
        check_field(
            len(pair) == 2
            and all(-1 <= value < 2**63 for value in pair)
            and (pair[1] == -1 or -1 < pair[0] <= pair[1]),
            "limits",
            f"{name} must be [soft, hard], each 0 to 2^63 or -1 for unlimited, and soft not over hard",
        )
