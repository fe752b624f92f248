"""Gathers the facts that `doctor` judges. Everything that may hang has a deadline."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpulease.client import Client
from gpulease.cuda import libcuda
from gpulease.cuda.ordinals import MASK, ORDER
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import GpuleaseError, Unavailable
from gpulease_protocol.host import systemd, variables
from gpulease_protocol.host.addresses import (
    DEFAULT_URL,
    SOCKET_NAME,
    SYSTEM_DATA_DIR,
    default_data_dir,
    has_system_socket,
)
from gpulease_protocol.host.server_owner import may_be_daemon, user_name
from gpulease_protocol.host.tcp_socket_owner import owner_of_listener
from gpulease_protocol.model import Node, NodeState
from gpulease_worker import doctor_joined, gpu_claims
from gpulease_worker.doctor_findings import Certificate, HostFacts
from gpulease_worker.doctor_service import UNITS
from gpulease_worker.probe import cuda_init_check, driver_check
from gpulease_worker.probe.probe_client import ProbeClient
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.processes import abstract_socket
from gpulease_worker.processes.bounded_run import bounded_run

SYSTEMCTL_S = 10.0
VERSION: ApiCall[str] = ApiCall(
    method="GET", path="/openapi.json", read=lambda document: str(document["info"]["version"])
)
DEADLINE_S = 60.0
"""How long NVML and nvidia-smi may take each: without persistence mode each initializes every GPU first."""
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
LIBRARY = "libnvidia-ml.so.1"
LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
)


def gather(data_dir: Path, certificate: Path | None = None, deadline_s: float = DEADLINE_S) -> HostFacts:
    """Examine this host, the daemon on this data directory with this certificate, and the daemon that clients would
    use."""
    reading = read_nvml(deadline_s)
    uuids, failed = ask_cuda(deadline_s) if reading.gpus else (None, None)
    path = data_dir / SOCKET_NAME
    # Where a daemon is named, or runs here, that one is asked.
    named = bool(os.environ.get(variables.URL)) or path.exists()
    environment = {} if named else doctor_joined.read_environment(doctor_joined.worker_directory())
    return HostFacts(
        **_daemon(environment),
        joined=doctor_joined.examine_joined(environment),
        joined_hidden=doctor_joined.is_hidden(SYSTEM_DATA_DIR / "worker"),
        kernel_driver=kernel_driver(KERNEL_DRIVER),
        library=library_version(_library_places()),
        nvml_problem=reading.problem,
        gpus=reading.gpus,
        cuda=uuids,
        cuda_problem=None if failed is None else str(failed),
        cuda_code=None if failed is None else failed.code,
        cuda_absent=isinstance(failed, libcuda.CudaNotInstalled),
        pid_namespace=_inode(Path("/proc/self/ns/pid")),
        network_of_host=abstract_socket.names_are_of_the_host(),
        claims=tuple(gpu_claims.holder_of(gpu.uuid) for gpu in reading.gpus),
        wsl=driver_check.WSL_DEVICE.exists(),
        persistence=_persistence(deadline_s),
        binding=_binding(),
        socket=str(path),
        socket_mode=_mode(path),
        socket_opens=_opens(path),
        port_strangers=port_strangers(urlsplit(DEFAULT_URL).port or 0),
        wall_s=time.time(),
        newest_s=_newest(data_dir),
        program_version=metadata.version("gpulease"),
        units=_units(),
        certificate=None if certificate is None else read_certificate(certificate),
        data_dir=str(data_dir),
        free_bytes=shutil.disk_usage(data_dir).free if data_dir.is_dir() else None,
    )


def read_nvml(deadline_s: float) -> Reading:
    """A reading by a separate probe process, which is killed if it takes too long."""
    return asyncio.run(_read_nvml(deadline_s))


async def _read_nvml(deadline_s: float) -> Reading:
    probe = ProbeClient("doctor", None, deadline_s, start_s=deadline_s)
    try:
        return await probe.read(())
    finally:
        await probe.close()


def ask_cuda(deadline_s: float) -> tuple[tuple[str, ...] | None, libcuda.CudaError | None]:
    """UUIDs of all GPUs that CUDA shows, regardless of this process's mask; or why it does not start."""
    environ = {name: value for name, value in os.environ.items() if name not in (MASK, ORDER)}
    try:
        return tuple(cuda_init_check.ask(environ, deadline_s)), None
    except libcuda.CudaError as failed:
        return None, failed


def kernel_driver(path: Path) -> str | None:
    """The version in a file like `/proc/driver/nvidia/version`; None if it cannot be read."""
    try:
        text = path.read_text()
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text, re.MULTILINE)
    return found[1] if found else None


def library_version(places: list[Path]) -> str | None:
    """The version of the first `libnvidia-ml.so.1` found, from the name of the file that it links to."""
    for place in places:
        if (place / LIBRARY).exists():
            found = re.search(r"\.so\.(\d+(?:\.\d+)+)$", (place / LIBRARY).resolve().name)
            return found[1] if found else None
    return None


def _library_places() -> list[Path]:
    given = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    return [Path(place) for place in (*given, *LIBRARY_DIRECTORIES)]


def _persistence(deadline_s: float) -> tuple[bool, ...] | None:
    command = ["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"]
    try:
        ran = bounded_run(command, deadline_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = ran.stdout.split() if ran.returncode == 0 else []
    return tuple(word == "Enabled" for word in words) if {*words} <= {"Enabled", "Disabled"} and words else None


def _binding() -> str | None:
    """The file that `import pynvml` would load, without importing it."""
    found = importlib.util.find_spec("pynvml")
    return None if found is None else found.origin or "a directory without __init__.py"


def _daemon(joined: Mapping[str, str]) -> dict[str, Any]:
    """What the daemon says of itself: fields of `HostFacts`. `joined`: the worker's variables, if it is elsewhere."""
    facts: dict[str, Any] = {"nodes": None}
    try:
        made = Client.for_destination(doctor_joined.destination(joined)) if joined else Client(timeout_s=5.0)
        with made as client:
            facts["daemon_version"] = client.send(VERSION)
            if joined:  # the worker's token shows no nodes
                return facts
            facts["nodes"] = client.nodes()
            facts["daemon_has_gpus"] = any(node.gpu_count and _without_driver_here(node) for node in facts["nodes"])
            ready = client.ready()
    except GpuleaseError as error:
        if "writer" in error.extra:
            return facts | {"stands_by_for": str(error.extra["writer"])}
        problem = error.detail.removeprefix("Not ready: ")
        if any(problem in (node.reason or "") for node in facts["nodes"] or ()):
            return facts  # `workers` says it
        is_from_daemon = isinstance(error, Unavailable) and "by_proxy" not in error.extra
        remedy = "See its log, and that of its worker." if is_from_daemon else error.remedy
        facts |= {"nodes": None, "daemon_problem": error.detail}
        return facts | {"daemon_remedy": remedy or "Start one with gpulease serve, or set GPULEASE_URL."}
    return facts | {"without_worker": ready.get("detail")}


def _without_driver_here(node: Node) -> bool:
    """Whether its GPUs may be there although this host has no driver: also while it is silent or paused."""
    return node.simulated or node.host != socket.gethostname() or node.state is NodeState.READY


def daemon_data_dir() -> Path:
    """The data directory of the daemon that this user's commands ask: their own, or the system's."""
    own = default_data_dir()
    return own if (own / SOCKET_NAME).exists() or not has_system_socket() else SYSTEM_DATA_DIR


def _units() -> dict[str, tuple[bool, bool]] | None:
    """The units of gpulease that are installed: whether each is enabled and active. None where systemd is not."""
    if not systemd.runs():
        return None
    found = {}
    for unit in UNITS:
        words = ["systemctl", "show", "--property=LoadState,UnitFileState,ActiveState", unit]
        try:
            printed = bounded_run(words, SYSTEMCTL_S).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
        state = {name: value for name, _, value in (line.partition("=") for line in printed.splitlines())}
        if state.get("LoadState") == "loaded":
            found[unit] = (state.get("UnitFileState") == "enabled", state.get("ActiveState") == "active")
    return found


def read_certificate(file: Path) -> Certificate:
    """What a certificate says (PEM)."""
    names = tuple(dict.fromkeys((socket.getfqdn(), socket.gethostname(), "localhost")))
    try:
        file.read_bytes()
        known: Any = ssl._ssl._test_decode_cert(str(file))  # type: ignore[attr-defined]
    except ssl.SSLError:
        return Certificate(file=str(file), problem="it is not a certificate in PEM")
    except OSError as error:
        return Certificate(file=str(file), problem=error.strerror)
    return Certificate(
        file=str(file),
        expires_s=float(ssl.cert_time_to_seconds(known["notAfter"])),
        names=tuple(name for _, name in known.get("subjectAltName", ())),
        host_names=names,
    )


def port_strangers(port: int) -> tuple[str, ...]:
    """Who listens at this port of loopback and may not be the daemon."""
    found = []
    for host, name in (("127.0.0.1", f"127.0.0.1:{port}"), ("::1", f"[::1]:{port}")):
        uid = owner_of_listener((host, port))
        if uid is not None and not may_be_daemon(uid):
            found.append(f"{name} (user {user_name(uid)})")
    return tuple(found)


def _opens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _newest(data_dir: Path) -> float | None:
    try:
        return max((entry.stat().st_mtime for entry in os.scandir(data_dir)), default=None)
    except OSError:
        return None
