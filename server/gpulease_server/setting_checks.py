"""What values the settings of `gpulease serve` may have, where bounds do not say it. Each raises ValueError."""

from __future__ import annotations

import re
import shlex

ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
DEFAULT_PORTS = {"http": 80, "https": 443}


def normalized_origins(origins: list[str] | None) -> list[str] | None:
    """Origins as browsers spell them: lower case, without a default port. Raises ValueError."""
    return None if origins is None else [_normalized_origin(text) for text in origins]


def _normalized_origin(text: str) -> str:
    if "*" in text or text.lower() == "null":
        raise ValueError(f"{text!r} would admit any page in any browser; list each origin separately")
    match = ORIGIN.fullmatch(text.lower())
    if match is None or not 0 < int(match["port"] or 1) < 65536:
        raise ValueError(f"{text!r} is not an origin; write it like https://dashboard.example or http://gpubox:3000")
    scheme, host, port = match["scheme"], match["host"], match["port"]
    default = port is None or int(port) == DEFAULT_PORTS[scheme]
    return f"{scheme}://{host}" if default else f"{scheme}://{host}:{int(port)}"


def checked_file_mode(text: str) -> str:
    """A file mode as chmod takes it. Raises ValueError."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ValueError(f"{text!r} is not a file mode; write it like 0666 or 0660")
    return text


def checked_admins(names: list[str] | None) -> list[str] | None:
    """Users, and groups with `@` before them. Raises ValueError."""
    for name in names or ():
        if not name.removeprefix("@") or re.search(r"[\s,:]", name):
            raise ValueError(f"{name!r} is neither a user nor a group; write it like ada or @sudo")
    return names


def checked_weights(texts: list[str] | None) -> list[str] | None:
    """Weights of GPU models. Raises ValueError."""
    for text in texts or ():
        gpu_weight(text)
    return texts


def gpu_weight(text: str) -> tuple[str, float]:
    """A part of the name of a GPU model, and for how many GPUs such a one counts. Raises ValueError."""
    model, _, number = text.rpartition("=")
    if not model or not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", number):
        raise ValueError(f"{text!r} is not MODEL=N with a number from 0 to 9999; write it like H100=2")
    return model, float(number)


def checked_shares(texts: list[str] | None) -> list[str] | None:
    """Shares of groups, one of each. Raises ValueError."""
    names = [group_share(text)[0] for text in texts or ()]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"group {name!r} is named twice; give it one share")
    return texts


def group_share(text: str) -> tuple[str, float]:
    """A group, and for how many users it counts. Raises ValueError."""
    name, _, number = text.rpartition("=")
    if not name or not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", number) or float(number) == 0:
        raise ValueError(f"{text!r} is not GROUP=N with a number over 0, up to 9999; write it like vision=5")
    return name, float(number)


def checked_command(text: str) -> str:
    """Words of a command as a shell splits them. Raises ValueError."""
    shlex.split(text)
    return text


def checked_reclaim(seconds: float) -> float:
    """The idle time after which GPUs are taken back, in seconds; 0 for never. Raises ValueError."""
    if 0 < seconds < 60:
        raise ValueError(f"must be 0, or 60 and more, not {seconds:g}")
    return seconds
