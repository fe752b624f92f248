"""CUDA_VISIBLE_DEVICES of the shell in which a command asks for GPUs: which GPUs its user wants, kept as a restriction.

A mask that a lease has set does not count: the lease replaces it. A mask that cannot be followed is named in a line.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from gpulease.client import Client
from gpulease.device_reuse import LEASE_VARIABLE
from gpulease_cli import output
from gpulease_cli.option_types import DeviceForm
from gpulease_protocol.errors import InvalidRequest, UnknownOrdinals
from gpulease_protocol.gpu_selection import MASK
from gpulease_protocol.model import Selection
from gpulease_protocol.obstacle_groups import gpu_ranges
from gpulease_protocol.requests import parse_devices

if TYPE_CHECKING:
    from gpulease.cuda.ordinals import VisibleDevices

HIDES_ALL = re.compile(r"\s*(-1|none|void|NoDevFiles)?\s*")


def among(client: Client, count: int, devices: DeviceForm | None, node: str | None, *, quiet: bool) -> list[str] | None:
    """The UUIDs of the GPUs to choose among, as `LeaseRequest.among`; None for any.

    Says on stderr to which GPUs the choice is restricted, unless `quiet`. Raises InvalidRequest if these are too few.
    """
    mask = os.environ.get(MASK)
    if mask is None or LEASE_VARIABLE in os.environ:
        return None
    selection: dict[str, Any] = {"count": count} if devices is None else parse_devices(devices)
    listed = selection.get("selection") is Selection.LISTED
    found = "--devices names the GPUs" if listed else _visible(client, mask, node)
    if isinstance(found, str):
        _say(f"{MASK}={mask} of this shell is not followed: {found}")
        return None
    shown, wanted = found.gpus, selection.get("count", 1)
    if wanted > len(shown):
        raise InvalidRequest(
            f"{'count' if devices is None else 'devices'}: {MASK}={mask} in this shell leaves"
            f" {len(shown)} GPU{'' if len(shown) == 1 else 's'}, not {wanted}.",
            remedy=f"Ask for fewer, or leave the choice to the daemon: env -u {MASK} gpulease ...",
        )
    if not quiet and len(shown) < len(found.host):
        _say(f"chooses among {gpu_ranges(sorted(gpu.index for gpu in shown))}, as {MASK}={mask} says")
    return sorted(gpu.uuid for gpu in shown)


def _visible(client: Client, mask: str, node: str | None) -> VisibleDevices | str:
    """What the mask shows of this host's GPUs, or why that means nothing here."""
    from gpulease.cuda.ordinals import visible_gpus  # noqa: PLC0415 - where there is a mask
    from gpulease.device_request import local_node  # noqa: PLC0415

    if HIDES_ALL.fullmatch(mask):
        return "it shows no GPU"
    gpus = client.gpus()
    here = local_node(client, {gpu.node for gpu in gpus})
    if here is None or node not in (None, here.name):
        return "it is about the GPUs of this host"
    own = sorted((gpu for gpu in gpus if gpu.node == here.name), key=lambda gpu: gpu.index)
    try:
        return visible_gpus(own, simulated=here.simulated)
    except UnknownOrdinals as error:
        return error.detail.rstrip(".")


def _say(text: str) -> None:
    output.say(f"gpulease: {text}\n")
