"""Sets up this host for all its users, and takes that back: `gpulease setup`.

`examine` reads what is there, `planned` says what is to be done, and `apply` does it. Planning is pure: what is shown
is what is done, and a second run finds nothing to do.

What must hold:

- A file that is meant to be changed is not overwritten: the configuration is written once, and changes to units belong
  into drop-ins (`systemctl edit`).
- What root runs belongs to root, and every user can read it.
- Records, logs and configuration stay when the program goes, unless they are to be purged.
"""

from __future__ import annotations

import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from importlib import resources
from pathlib import Path

from gpulease.client import Client
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.host import systemd
from gpulease_protocol.host.addresses import SYSTEM_DATA_DIR
from gpulease_protocol.host.config_file import SYSTEM as CONFIG
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import JobState
from gpulease_server import other_daemons, running_programs
from gpulease_server.running_programs import JOB, RunningProgram
from gpulease_server.runtime.group_members import find_group

UNITS = ("gpulease.socket", "gpulease.service", "gpulease-worker.service")
"""Those of deploy/systemd, in the order in which they start."""
SERVICES = UNITS[1:]
PREFIX = Path("/opt/gpulease")
"""Where the units expect the program; only from here is it removed."""
PROGRAM_IN_UNITS = str(PREFIX / "bin" / "gpulease")
ADMIN_GROUPS = ("sudo", "wheel")
"""Whose members are root if they want to: the first that the host has."""
UNFINISHED = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
MOST_NAMED = 8
"""Jobs that a refusal names."""
WHEELS = "wheel"
"""Where docs/install.md puts the wheel for users, in the program's directory."""
COMMAND_S = 120.0
"""How long `systemctl` may take."""


class CannotSetUp(GpuleaseError):
    """This host cannot be set up as it is, or only a part of it was."""

    code, title = "cannot_set_up", "Cannot set up"


class CannotUninstall(CannotSetUp):
    """The program stays on this host, or a part of it."""

    code, title = "cannot_uninstall", "Cannot uninstall"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the files go."""

    units: Path = Path("/etc/systemd/system")
    link: Path = Path("/usr/local/bin/gpulease")
    config: Path = CONFIG
    data: Path = SYSTEM_DATA_DIR
    prefix: Path = PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What was found on this host."""

    program: Path
    """The program that the units are to start."""
    closed: str | None = None
    """Why root must not run that program, or other users cannot; None if both is fine."""
    units: Mapping[str, str] = field(default_factory=dict)
    """The units that are installed, and their text."""
    link: Path | None = None
    """Where the link leads; None without one."""
    link_is_file: bool = False
    """Something else has the link's place."""
    config: bool = False
    """There is a configuration file."""
    kept: tuple[Path, ...] = ()
    """Of configuration and data, what exists."""
    systemd: bool = False
    """Whether systemd runs this host."""
    enabled: frozenset[str] = frozenset()
    """Units that start with the host."""
    active: frozenset[str] = frozenset()
    """Units that run."""
    outdated: tuple[RunningProgram, ...] = ()
    """Daemons and workers that run since before this version was installed."""
    daemon: str | None = None
    """The daemon that answers where clients look, in words; None if none does."""
    jobs: tuple[str, ...] | None = ()
    """Jobs that have not ended; None where no daemon says it."""
    running: tuple[RunningProgram, ...] = ()
    """Daemons, workers and jobs of this installation."""
    wheel: Path | None = None
    """What users can install of the client, built from the checkout."""


class Step:
    """One change; `str` says which, as a command or in words."""

    def do(self) -> None:
        """Make it. Raises OSError or subprocess.SubprocessError."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Write(Step):
    """Write a file."""

    path: Path
    text: str
    why: str

    def __str__(self) -> str:
        return f"write {self.path} ({self.why})"

    def do(self) -> None:
        """Make it, whole or not at all."""
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text(self.text)
        new.chmod(0o644)
        new.replace(self.path)


@dataclass(frozen=True, slots=True)
class Link(Step):
    """Make a symbolic link, in place of another one."""

    path: Path
    target: Path

    def __str__(self) -> str:
        return f"link {self.path} to {self.target}"

    def do(self) -> None:
        """Make it."""
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self.path.symlink_to(self.target)


@dataclass(frozen=True, slots=True)
class Remove(Step):
    """Remove a file or a whole directory."""

    path: Path
    what: str = ""

    def __str__(self) -> str:
        return f"remove {self.path}{f' ({self.what})' if self.what else ''}"

    def do(self) -> None:
        """Make it; what is gone already is fine."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Run(Step):
    """Run a command."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"run {' '.join(self.words)}"

    def do(self) -> None:
        """Make it."""
        subprocess.run(self.words, check=True, capture_output=True, text=True, timeout=COMMAND_S)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, and what to know about it."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """What is left to the administrator."""
    without_steps: str = "Nothing to do."
    """What to say where there is no step."""
    failure: type[CannotSetUp] = CannotSetUp
    """What it is when a step fails."""


def planned(host: Host, config: str, units: Mapping[str, str], places: Places = Places()) -> Plan:
    """What makes this host ready for all its users. Raises `CannotSetUp`.

    `config`: the configuration file to begin with; `units`: those to install, by name.
    """
    if host.closed is not None:
        raise CannotSetUp(host.closed, remedy=HOW_TO_INSTALL)
    if host.link_is_file and host.program != places.link:
        raise CannotSetUp(f"{places.link} is not a link.", remedy="Move it away, and run this again.")
    texts = {name: text.replace(PROGRAM_IN_UNITS, str(host.program)) for name, text in units.items()}
    changed = [name for name, text in texts.items() if host.units.get(name) != text]
    steps: list[Step] = [
        Write(places.units / name, texts[name], "another version is there" if name in host.units else "the unit")
        for name in changed
    ]
    if host.program not in (host.link, places.link):
        steps.append(Link(places.link, host.program))
    if not host.config:
        steps.append(Write(places.config, config, "the settings, with their defaults"))
    if not host.systemd:
        return _without_systemd(host, steps, places)
    if changed:
        steps.append(Run(("systemctl", "daemon-reload")))
    if host.daemon is not None and "gpulease.service" not in host.active:
        raise _other_daemon(host.daemon)
    steps += _restarts(host, changed)
    if not host.enabled & host.active >= {*UNITS}:
        steps.append(Run(("systemctl", "enable", "--now", *UNITS)))
    return Plan(tuple(steps), ("`gpulease status` shows the GPUs, `gpulease doctor` what is wrong.", *_for_users(host)))


def _restarts(host: Host, changed: Sequence[str]) -> list[Step]:
    """Restarts of units that are older and run. systemd starts a socket unit with its daemon, and not beside it."""
    outdated = {program.service for program in host.outdated}
    again = [unit for unit in UNITS if unit in host.active and (unit in changed or unit in outdated)]
    socket, daemon, _ = UNITS
    if daemon not in host.active or (socket in host.active and socket not in again):
        return [Run(("systemctl", "restart", *again))] if again else []
    stop = [Run(("systemctl", "stop", socket))] if socket in again else []
    again = [unit for unit in UNITS if unit == daemon or (unit in again and unit != socket)]
    return [*stop, Run(("systemctl", "restart", *again))]


def removal(host: Host, *, purge: bool, places: Places = Places()) -> Plan:
    """What takes the program off this host; with `purge` also configuration, records and logs. Raises `CannotSetUp`."""
    _refuse_while_in_use(host)
    steps: list[Step] = []
    installed = [name for name in UNITS if name in host.units]
    if installed and host.systemd:
        steps.append(Run(("systemctl", "disable", "--now", *installed)))
    steps += [Remove(places.units / name) for name in installed]
    if installed and host.systemd:
        steps.append(Run(("systemctl", "daemon-reload")))
    if host.link == host.program:
        steps.append(Remove(places.link))
    if purge:
        steps += [
            Remove(path, "settings" if path == places.config.parent else "records and logs") for path in host.kept
        ]
    ours = host.program.parent.parent == places.prefix
    if ours:
        steps.append(Remove(places.prefix, "the program"))
    kept = " ".join(map(str, host.kept))
    notes = [f"Settings, records and logs stay. To remove them too: rm -r {kept}"] if kept and not purge else []
    if not ours:
        notes.append(f"The program itself stays in {host.program.parent.parent}: remove it as it was installed.")
    return Plan(tuple(steps), tuple(notes), failure=CannotUninstall)


def apply(plan: Plan) -> Iterator[Step]:
    """Make each step, and yield it when it is made. Raises `CannotSetUp` that says what is made and what is not."""
    for number, step in enumerate(plan.steps):
        try:
            step.do()
        except (OSError, subprocess.SubprocessError) as error:
            made, left = plan.steps[:number], plan.steps[number + 1 :]
            raise plan.failure(
                f"Failed: {step}: {_reason(error)}. Done: {_listed(made)}. Not done: {_listed(left)}.",
                remedy="Fix the cause and run this again: steps that are done are not repeated.",
            ) from None
        yield step


HOW_TO_INSTALL = (
    "Install it with the system's Python in a place of its own, from a checkout: umask 022; /usr/bin/python3 -m venv"
    " --clear /opt/gpulease, then /opt/gpulease/bin/pip install -c constraints.txt '.[server]', then"
    " /opt/gpulease/bin/gpulease setup. See docs/install.md."
)


def _without_systemd(host: Host, steps: Sequence[Step], places: Places) -> Plan:
    if host.outdated:
        todo = f"Restart the programs that were started before this version was installed: {_listed(host.outdated)}."
        return Plan(tuple(steps), (todo, *_for_users(host)), "No file has to be changed.")
    if host.daemon is not None:
        return Plan(tuple(steps), (f"systemd does not run here, and {host.daemon}.", *_for_users(host)))
    notes = (
        "systemd does not run here. Have your service manager start two programs as root:",
        f"{host.program} serve --no-worker",
        f"{host.program} worker --url unix://{places.data / 'gpulease.sock'}",
        "On a host without GPUs the worker simulates some with --simulate 4.",
    )
    return Plan(tuple(steps), (*notes, *_for_users(host)))


def _for_users(host: Host) -> tuple[str, ...]:
    return (f"For training environments: pip install {host.wheel}",) if host.wheel else ()


def _refuse_while_in_use(host: Host) -> None:
    """Raise `CannotUninstall` where jobs have not ended, and while programs run that systemd would not end."""
    supervised = {program.name: program for program in host.running if program.kind == JOB}
    jobs = tuple(dict.fromkeys((*(host.jobs or ()), *supervised)))
    if jobs:
        some, have = jobs[:MOST_NAMED], "1 job has" if len(jobs) == 1 else f"{len(jobs)} jobs have"
        cancel = f"gpulease cancel {' '.join(some)}"
        if host.jobs is None:  # no daemon answers
            pids = " ".join(str(supervised[job].pid) for job in some)
            cancel = f"Start the daemon, then {cancel}; or without it: kill {pids}"
        raise CannotUninstall(
            f"{have} not ended: {', '.join(some)}{' ...' if len(jobs) > len(some) else ''}."
            " They would continue with nothing to end them.",
            remedy=cancel,
        )
    others = [program for program in host.running if not (host.systemd and program.service)]
    if others:
        raise CannotUninstall(
            f"Still running, and systemd has not started it: {_listed(others)}.",
            remedy=f"End it, and run this again: kill {' '.join(str(program.pid) for program in others)}",
        )
    if host.daemon is not None and "gpulease.service" not in host.active:
        raise _other_daemon(host.daemon, CannotUninstall)


def _other_daemon(words: str, kind: type[CannotSetUp] = CannotSetUp) -> CannotSetUp:
    return kind(f"{words[0].upper()}{words[1:]}, and systemd has not started it.", remedy="End it, and run this again.")


def _listed(some: Sequence[object]) -> str:
    return "; ".join(map(str, some)) or "nothing"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or error.stdout or "").strip()
        return " ".join(said.split()).rstrip(".") or f"exit code {error.returncode}"
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


# What is there.


def examine(places: Places = Places()) -> Host:
    """What is on this host."""
    program = Path(sys.prefix) / "bin" / "gpulease"
    units = {name: text for name in UNITS if (text := _text(places.units / name)) is not None}
    has_systemd = systemd.runs()
    other = other_daemons.first_of(other_daemons.usual_addresses())
    running = running_programs.of_installation(Path(sys.prefix), places.data, SERVICES)
    installed_at_s = running_programs.installed_at_s()
    return Host(
        program=program,
        closed=next(
            filter(None, map(unsafe, (program, Path(sys.executable).resolve(), Path(__file__).resolve()))), None
        ),
        units=units,
        link=places.link.readlink() if places.link.is_symlink() else None,
        link_is_file=places.link.exists() and not places.link.is_symlink(),
        config=places.config.exists(),
        kept=tuple(path for path in (places.config.parent, places.data) if path.exists()),
        systemd=has_systemd,
        enabled=frozenset(
            unit for unit in UNITS if has_systemd and _systemctl("is-enabled", "--quiet", unit) is not None
        ),
        active=frozenset(
            unit for unit in UNITS if has_systemd and _systemctl("is-active", "--quiet", unit) is not None
        ),
        outdated=tuple(one for one in running if one.kind != JOB and one.started_at_s < installed_at_s),
        daemon=None if other is None else str(other),
        jobs=_jobs(other),
        running=running,
        wheel=max(
            (Path(sys.prefix) / WHEELS).glob("gpulease-*.whl"), default=None, key=lambda file: file.stat().st_mtime
        ),
    )


def unit_files() -> dict[str, str]:
    """The units that come with the program: in the installed package, or in a checkout."""
    installed = Path(str(resources.files("gpulease_server"))) / "units"
    directory = installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "deploy" / "systemd"
    return {name: (directory / name).read_text() for name in UNITS}


def usual_admins() -> tuple[str, ...]:
    """The group of this host with members who may become root, as `--admin` takes it."""
    return next(((f"@{group}",) for group in ADMIN_GROUPS if find_group(group) is not None), ())


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def unsafe(place: Path) -> str | None:
    """Why other users cannot run the program at this place, or root must not; None if both is fine."""
    home = next((home for home in _homes() if place.is_relative_to(home)), None)
    if home is not None:
        return f"{place} is in {home}: a program in a home directory belongs to one user, and is not for all users."
    for path in (place, *place.parents):
        try:
            status = path.stat()
        except OSError as error:
            return f"{path}: {error.strerror}."
        if path != place and not status.st_mode & 0o001:
            return f"Other users cannot enter {path}, in which {place} is."
        if status.st_uid != 0:
            return f"{path} does not belong to root: its owner could change what root runs."
    return None


def _homes() -> tuple[Path, ...]:
    """Where people have their homes, and root's."""
    try:
        roots = Path(pwd.getpwuid(0).pw_dir)
    except KeyError:
        roots = Path("/root")
    return Path("/home"), roots if roots != Path("/") else Path("/root")


def _jobs(other: other_daemons.OtherDaemon | None) -> tuple[str, ...] | None:
    if other is None:
        return None
    try:
        with Client(other.url, timeout_s=10.0) as client:
            return tuple(job.id for job in client.jobs(UNFINISHED))
    except GpuleaseError:
        return None


def _systemctl(*words: str) -> str | None:
    """What it prints; None if it fails."""
    try:
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
