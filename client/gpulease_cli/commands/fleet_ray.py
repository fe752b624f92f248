"""`gpulease fleet ray`: workers as actors of Ray."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gpulease_cli import output
from gpulease_cli.commands import fleet
from gpulease_cli.help_format import command
from gpulease_cli.option_types import Number
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option

if TYPE_CHECKING:
    from gpulease_fleet.ray_carrier import RayOptions

GPUS = option(
    "--gpus", type=Number(int, 1, 64), metavar="N", default=8, show_default="8", help="GPUs of each node: all it has."
)
ADDRESS = option(
    "--address",
    metavar="ADDRESS",
    default="auto",
    show_default="auto",
    help="The cluster of Ray.",
)


@command(examples=("gpulease fleet ray up --nodes 4 --gpus 8",))
@fleet.POOL
@option("--nodes", type=Number(int, 0, fleet.MAX_PILOTS), metavar="N", help="Fixed number of nodes.")
@option("--min", "least", type=Number(int, 0, fleet.MAX_PILOTS), metavar="N", help="Minimum number of nodes.")
@option(
    "--max",
    "most",
    type=Number(int, 0, fleet.MAX_PILOTS),
    metavar="N",
    help="Maximum number of nodes, while requests wait.",
)
@fleet.IDLE
@GPUS
@ADDRESS
@option("--shared", is_flag=True, help="Several nodes of Ray are on one host.")
@fleet.WORKER_URL
@fleet.WORKER_OPTION
@fleet.WORKER_DIR
@fleet.PROGRAM
@fleet.LEAVE
@fleet.TICK
@option("--once", is_flag=True, help="Make one round and exit, for use from cron.")
@option("--no-doctor", is_flag=True, help="Start even if `doctor` finds problems.")
@fleet.STATE_DIR
def ray_up(
    pool: str,
    nodes: int | None,
    least: int | None,
    most: int | None,
    idle: float,
    gpus: int,
    address: str,
    shared: bool,
    worker_url: str | None,
    worker_option: tuple[str, ...],
    worker_dir: str | None,
    program: str | None,
    leave: float,
    tick: float,
    once: bool,
    no_doctor: bool,
    state_dir: Path | None,
) -> int:
    """Keep workers running as actors of Ray, one for each node, with all its GPUs.

    Runs until it is stopped, which ends no pilot: the next `up` of the pool goes on with them. Needs an administrator's
    rights at the daemon, and the package ray in the version of the cluster.
    """
    from gpulease_fleet.ray_carrier import RayCarrier, RayOptions  # noqa: PLC0415 - for this command alone
    from gpulease_fleet.worker_script import default_directory  # noqa: PLC0415 - the same

    url = worker_url or os.environ.get("GPULEASE_URL") or ""
    fleet.check_url(url, plain="--plain-http" in worker_option)
    options = RayOptions(
        url=url,
        gpus=gpus,
        address=address,
        shared=shared,
        worker=worker_option,
        program=program or shutil.which("gpulease") or str(Path(sys.executable).parent / "gpulease"),
        directory=worker_dir or str(default_directory(pool)),
        leave_s=leave,
    )
    size = fleet.size_of(nodes, least, most)
    return fleet.up(
        pool,
        RayCarrier(options),
        asdict(options),
        size,
        idle,
        tick,
        once=once,
        no_doctor=no_doctor,
        state_dir=state_dir,
    )


@command(examples=("gpulease fleet ray status", "gpulease fleet ray status --pool night --json"))
@fleet.POOL
@fleet.STATE_DIR
@JSON
def ray_status(pool: str, state_dir: Path | None, json: bool) -> None:
    """Show a pool and its workers."""
    fleet.show_status(pool, state_dir, json)


@command(examples=("gpulease fleet ray down --pool night",))
@fleet.POOL
@fleet.TICK
@fleet.STATE_DIR
def ray_down(pool: str, tick: float, state_dir: Path | None) -> int:
    """End a pool: wait until its nodes have left; their jobs continue elsewhere."""
    from gpulease_fleet.ray_carrier import RayCarrier, RayOptions  # noqa: PLC0415 - for this command alone

    return fleet.down(pool, tick, state_dir, lambda known: RayCarrier(_options(RayOptions, known)))


@command(examples=("gpulease fleet ray doctor --gpus 8",))
@GPUS
@ADDRESS
@JSON
def ray_doctor(gpus: int, address: str, json: bool) -> int:
    """Find what would break a pool on the cluster, and say how to fix it. Exits 1 if there is anything."""
    from gpulease_fleet.ray_carrier import RayCarrier, RayOptions  # noqa: PLC0415 - for this command alone

    found = RayCarrier(RayOptions(url="", gpus=gpus, address=address, program="", directory="")).doctor()
    if json:
        output.print_json([asdict(one) for one in found])
    else:
        fleet.print_findings(found)
    return output.DONE if all(one.ok for one in found) else output.REFUSED


def _options(kind: type[RayOptions], known: dict[str, object]) -> RayOptions:
    return kind(**known | {"worker": tuple(known["worker"])})  # type: ignore[arg-type]
