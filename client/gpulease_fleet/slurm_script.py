"""What a pilot asks Slurm for, and its batch script: the worker that it keeps running."""

from __future__ import annotations

from gpulease_fleet.carrier import PilotName
from gpulease_fleet.worker_script import worker_script
from gpulease_protocol.lazy_dataclass import dataclass

SIGNAL_BEFORE_S = 30
"""The worker leaves by itself, by the time that is left. This signal is for the case that it could not learn that;
Slurm sends it up to 60 s earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What every pilot of a pool asks Slurm for, and how its worker is started."""

    url: str
    """Where workers reach the daemon."""
    gres: str = "gpu:1"
    """As `sbatch --gres`."""
    time: str = "24:00:00"
    """As `sbatch --time`."""
    exclusive: bool = True
    """True when a pilot has its host alone; its node then has the name of the host."""
    sbatch: tuple[str, ...] = ()
    """Further options of `sbatch`, each `--name=value`."""
    worker: tuple[str, ...] = ()
    """Further options of `gpulease worker`."""
    program: str
    """Path of the program `gpulease` on the hosts."""
    directory: str
    """Directory for logs of pilots and data of workers; on a disk that outlives an allocation."""
    leave_s: float = 60.0
    """How long before the end of its allocation a worker begins to leave. Seconds."""


def sbatch_options(options: SlurmOptions, name: PilotName) -> list[str]:
    """The options of `sbatch` for a pilot, for its command line: there they outrank the variables `SBATCH_...`.

    What keeps a pilot the only one of its name comes after the options of the user.
    """
    return [
        f"--gres={options.gres}",
        f"--time={options.time}",
        *(["--exclusive"] if options.exclusive else []),
        "--open-mode=append",
        f"--signal=B:TERM@{SIGNAL_BEFORE_S}",
        f"--output={options.directory}/pilot-%j.log",
        "--export=GPULEASE_CACERT,HOME,LANG,PATH,SSL_CERT_FILE,USER",
        *options.sbatch,
        f"--job-name={name}",
        "--nodes=1",
        "--ntasks=1",
        # Put back into the queue, it would come back under the same generation while the old one may still run.
        "--no-requeue",
    ]


def pilot_script(options: SlurmOptions, name: PilotName, token: str) -> str:
    """The script, with the token in it."""
    return "\n".join(
        [
            "#!/bin/sh",
            worker_script(
                program=options.program,
                url=options.url,
                token=token,
                directory=options.directory,
                node="$SLURMD_NODENAME" if options.exclusive else f"$SLURMD_NODENAME-{name.pool}-{name.ordinal}",
                allocation="slurm",
                leave_s=options.leave_s,
                options=options.worker,
            ),
        ]
    )
