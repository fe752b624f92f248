"""The batch script of a pilot: keeps a worker running in its allocation, and has it leave in time."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from gpulease_fleet.carrier import PilotName

SIGNAL_BEFORE_S = 30
"""The worker leaves by itself, by the time that is left. This signal is for the case that it could not learn that;
Slurm sends it up to 60 s earlier."""
LOOP = """
left= restarts=0
trap 'left=1; kill -TERM "$worker" 2>/dev/null' TERM
while :; do
    began=$(date +%s)
    "$@" &
    worker=$!
    while kill -0 "$worker" 2>/dev/null; do wait "$worker"; code=$?; done
    # 0: it has left. Otherwise it was killed, and its jobs run on: the next one finds them again.
    [ "$code" = 0 ] && exit 0
    [ -n "$left" ] && exit "$code"
    [ $(($(date +%s) - began)) -gt 60 ] && restarts=0
    restarts=$((restarts + 1))
    echo "the worker has ended with $code; start $restarts of 10"
    [ "$restarts" -ge 10 ] && exit "$code"
    sleep "$restarts" & wait $!
done
"""


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
    """The options of `sbatch` for a pilot."""
    return [
        f"--job-name={name}",
        "--nodes=1",
        "--ntasks=1",
        f"--gres={options.gres}",
        f"--time={options.time}",
        *(["--exclusive"] if options.exclusive else []),
        # Put back into the queue, it would come back under the same generation while the old one may still run.
        "--no-requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{SIGNAL_BEFORE_S}",
        f"--output={options.directory}/pilot-%j.log",
        "--export=GPULEASE_CACERT,HOME,LANG,PATH,SSL_CERT_FILE,USER",
        *options.sbatch,
    ]


def pilot_script(options: SlurmOptions, name: PilotName, token: str) -> str:
    """The script, with the token in it."""
    node = "$SLURMD_NODENAME" if options.exclusive else f"$SLURMD_NODENAME-{name.pool}-{name.ordinal}"
    worker = [
        shlex.quote(options.program),
        "worker",
        f"--url={shlex.quote(options.url)}",
        f'--node="{node}"',
        f'--data-dir={shlex.quote(options.directory)}/"{node}"',
        "--allocation=slurm",
        f"--leave-s={options.leave_s:g}",
        *map(shlex.quote, options.worker),
    ]
    return "\n".join(
        [
            "#!/bin/sh",
            *(f"#SBATCH {option}" for option in sbatch_options(options, name)),
            "umask 077",
            f"export GPULEASE_TOKEN={shlex.quote(token)}",
            f"set -- {' '.join(worker)}",
            LOOP.lstrip("\n"),
        ]
    )


def default_directory(pool: str) -> Path:
    """Where the logs of a pool's pilots and the data of its workers are, unless said otherwise."""
    return Path.home() / ".local/share/gpulease/fleet" / pool
