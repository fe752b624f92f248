"""pytest plugin: `pytest --gpulease[=N]` runs the tests on N leased GPUs, with pytest-xdist on N for each worker.

Without the option it only declares the marker `gpus`. With it, CUDA_VISIBLE_DEVICES names the leased GPUs before
anything of the tests is imported, conftest.py included, because CUDA reads it once.

- One process: it holds the lease itself, until it ends.
- pytest-xdist: its controller takes one lease for each worker and starts no worker without one. It waits for the first
  only: the scheduler hands out tests when all workers have collected, so a worker that waited for GPUs would stop those
  that hold them, and two runs that wait for each other's GPUs would both stop. The lease of a worker that has ended is
  released, unless another worker takes its place.
- Inside a lease (`gpulease run -n 4 -- pytest --gpulease -n 4`): the GPUs of that lease are shared out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from dataclasses import field
from typing import TYPE_CHECKING, Any

import pytest

from gpulease_protocol.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from gpulease.lease import HeldLease

MASK = "CUDA_VISIBLE_DEVICES"
WITHOUT_VARIABLE = "PYTEST_GPULEASE_WITHOUT"
"""Set in workers that run without GPUs: why."""
REPLACED_WITHIN_S = 120.0
"""How long the GPUs of a worker that died are kept for the one that replaces it."""
LOOKS = ("help", "version", "markers", "showfixtures", "show_fixtures_per_test")
"""Options with which pytest imports no test."""
BIND_WORKER = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a worker ends with its controller
for name, value in channel.receive().items():
    os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
"""


@dataclass(eq=False)
class Share:
    """The GPUs of one process of tests."""

    env: dict[str, str | None]
    """Binds the process to them; None unsets a variable."""
    gpus: str
    """Their names, for people."""
    lease: HeldLease | None = None
    """None if this process does not hold it."""
    worker: str | None = None
    """The id of the worker that uses them."""

    def release(self) -> None:
        """Give them back."""
        if self.lease is not None:
            self.lease.__exit__(None, None, None)


@dataclass(eq=False)
class Leased:
    """What a process of tests has, as a plugin of pytest: it skips tests that need more."""

    gpus: int
    """How many GPUs a test can use."""
    why: str = ""
    """Why there are none."""
    shown: str = ""
    """The line in pytest's header."""
    shares: list[Share] = field(default_factory=list)

    def lost(self) -> str | None:
        """A message if a lease was lost, else None."""
        lost = [share.lease.id for share in self.shares if share.lease is not None and share.lease.lost.is_set()]
        return f"gpulease: lease {lost[0]} is lost, and others may use its GPUs now." if lost else None

    def pytest_report_header(self) -> str:
        """Which GPUs the tests run on."""
        return f"gpulease: {self.shown}"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip the tests that need more GPUs than there are."""
        for item in items:
            if (needed := _needed(item)) > self.gpus:
                has = f"there are none: {self.why}" if self.why else f"{self.gpus} leased: pytest --gpulease={needed}"
                item.add_marker(pytest.mark.skip(reason=f"needs {_count(needed)}, {has}"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """End the run when the lease is lost."""
        if (lost := self.lost()) is not None:
            pytest.exit(lost, returncode=1)

    def pytest_unconfigure(self) -> None:
        """Give the GPUs back."""
        for share in self.shares:
            share.release()


@dataclass(eq=False)
class Controller(Leased):
    """The controller of pytest-xdist: binds each worker to its share."""

    max_crashes: int | None = None
    """How many workers that crash are replaced; None for all."""
    crashes: int = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Bind a worker that has started, before it imports pytest."""
        share = next((share for share in self.shares if share.worker is None), None)
        if share is None:
            raise pytest.UsageError("gpulease: pytest-xdist started more workers than it had announced.")
        share.worker = node.gateway.id
        channel = node.gateway.remote_exec(BIND_WORKER)
        channel.send(share.env)
        channel.waitclose(60)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Release the share of a worker that has ended, unless it crashed and another one is on its way."""
        self.crashes += error is not None
        is_replaced = error is not None and (self.max_crashes is None or self.crashes <= self.max_crashes)
        for share in [*self.shares]:
            if share.worker == node.gateway.id:
                share.worker = None
                timer = threading.Timer(REPLACED_WITHIN_S * is_replaced, self._release_unused, [share])
                timer.daemon = True
                timer.start()

    def _release_unused(self, share: Share) -> None:
        if share.worker is None:
            self.shares.remove(share)
            share.release()

    def pytest_runtest_logreport(self) -> None:
        """End the run when a lease is lost."""
        if (lost := self.lost()) is not None:
            pytest.exit(lost, returncode=1)


LEASED = pytest.StashKey[Leased]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("gpulease", "GPUs leased from gpulease")
    group.addoption(
        "--gpulease", nargs="?", const=1, type=_gpu_count, metavar="N",
        help="lease N GPUs (1 without a number) for the tests, with pytest-xdist for each worker",
    )  # fmt: skip
    group.addoption(
        "--gpulease-wait", metavar="TIME", help="how long to wait for GPUs: 90s, 10m (default: GPULEASE_WAIT_S, or 0)"
    )
    group.addoption(
        "--gpulease-or-skip", action="store_true",
        help="if no GPUs are granted, hide all GPUs and skip the tests marked gpus",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and lease the GPUs of xdist's workers."""
    config.addinivalue_line("markers", "gpus(n=1): needs n GPUs; skipped if pytest --gpulease leases fewer")
    if config.option.gpulease is not None and LEASED not in config.stash and not _only_looks(config.option):
        _lease(config, config.option)
    if LEASED in config.stash:
        config.pluginmanager.register(config.stash[LEASED], "gpulease-leased")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Lease the GPUs of this process before a conftest.py is imported, and before output is captured."""
    options = early_config.known_args_namespace
    if options.gpulease is not None and not _only_looks(options) and not _may_distribute(options):
        _lease(early_config, options)
    return (yield)


def _lease(config: pytest.Config, options: Any) -> None:
    """Lease what the options ask for. Raises UsageError."""
    from gpulease_protocol.durations import parse_duration  # noqa: PLC0415 - only with the option
    from gpulease_protocol.errors import GpuleaseError  # noqa: PLC0415

    if options.collectonly:
        os.environ[MASK] = ""
        config.stash[LEASED] = Leased(0, "nothing is leased for --collect-only", "no GPUs for --collect-only")
        return
    try:
        wait_s = None if options.gpulease_wait is None else parse_duration(options.gpulease_wait)
    except ValueError as error:
        raise pytest.UsageError(f"--gpulease-wait: {error}") from None
    distributed = getattr(options, "tx", None) and options.dist != "no"
    try:
        if why := os.environ.get(WITHOUT_VARIABLE):
            config.stash[LEASED] = Leased(0, why, f"no GPUs: {why}")
        elif distributed:
            config.stash[LEASED] = _lease_for_workers(config, options.gpulease, wait_s)
        else:
            config.stash[LEASED] = _lease_for_this_process(options.gpulease, wait_s)
    except GpuleaseError as error:
        if not options.gpulease_or_skip:
            raise pytest.UsageError(_refusal(error)) from None
        os.environ |= {MASK: "", WITHOUT_VARIABLE: error.detail}
        config.stash[LEASED] = Leased(0, error.detail, f"no GPUs: {error.detail}")


def _lease_for_this_process(gpus: int, wait_s: float | None) -> Leased:
    """Narrow CUDA_VISIBLE_DEVICES to GPUs of the surrounding lease, or to new ones."""
    import gpulease  # noqa: PLC0415

    gpulease.find_usable_cuda_devices(gpus, wait_s=wait_s, label="pytest", set_visible=True)
    shares = [Share({}, _names(lease), lease) for lease in gpulease.reserved_leases()]
    return Leased(gpus, shown=shares[0].gpus if shares else f"{_count(gpus)} of the surrounding lease", shares=shares)


def _lease_for_workers(config: pytest.Config, gpus: int, wait_s: float | None) -> Controller:
    """A share for each worker that can have one; the others are not started."""
    from xdist.workermanage import parse_tx_spec_config  # noqa: PLC0415 - there are workers, so it is installed

    specs = parse_tx_spec_config(config)
    if any(not spec.startswith("popen") for spec in specs):
        raise pytest.UsageError("--gpulease leases GPUs of this host. Use workers of this host: -n, or --tx popen.")
    surrounding = _surrounding_mask()
    shares = _new_shares(len(specs), gpus, wait_s) if surrounding is None else _parts(surrounding, gpus)[: len(specs)]
    if not shares:
        has = _count(len(surrounding or []))
        raise pytest.UsageError(f"--gpulease={gpus}: the surrounding lease has {has}. Ask for fewer.")
    max_crashes = _max_crashes(config.option)
    config.option.tx = specs[: len(shares)]
    config.option.numprocesses = len(shares)
    shown = f"{len(shares)} workers on {'; '.join(share.gpus for share in shares)}"
    if len(shares) < len(specs):
        shown += f" ({len(specs)} were asked for: the others would have waited for GPUs)"
    return Controller(gpus, shown=shown, shares=shares, max_crashes=max_crashes)


def _max_crashes(options: Any) -> int | None:
    """How many workers that crash pytest-xdist replaces; None for all."""
    if options.maxworkerrestart is not None:
        return int(options.maxworkerrestart)
    return 4 * options.numprocesses if options.numprocesses else None


def _new_shares(workers: int, gpus: int, wait_s: float | None) -> list[Share]:
    """At most this many leases: the first is waited for, the others are taken if their GPUs are free now."""
    import gpulease  # noqa: PLC0415

    shares: list[Share] = []
    for _ in range(workers):
        known = {share.lease for share in shares}
        wait = 0.0 if shares else wait_s
        try:
            gpulease.find_usable_cuda_devices(gpus, wait_s=wait, label="pytest", reuse=False)
        except (gpulease.NotNow, gpulease.NeverFits):
            if not shares:
                raise
            break
        lease = next(lease for lease in gpulease.reserved_leases() if lease not in known)
        shares.append(Share(dict(lease.env), _names(lease), lease))
    return shares


def _surrounding_mask() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of the lease that this process was started under; None outside any."""
    lease_id = os.environ.get("GPULEASE_LEASE_ID")
    if not lease_id or not os.environ.get(MASK):
        return None
    import gpulease  # noqa: PLC0415

    try:
        with gpulease.Client() as client:
            active = client.lease_by_id(lease_id).state == "active"
    except gpulease.NotFound:
        return None
    return os.environ[MASK].split(",") if active else None


def _parts(mask: list[str], gpus: int) -> list[Share]:
    """Shares of a surrounding lease. It has one port for a rendezvous, so that of its first rank is not given twice."""
    parts = [mask[start : start + gpus] for start in range(0, len(mask) - gpus + 1, gpus)]
    ports = [os.environ.get("MASTER_PORT"), *(None for _ in parts)]
    return [
        Share({MASK: ",".join(part), "MASTER_PORT": port}, ", ".join(part))
        for part, port in zip(parts, ports, strict=False)
    ]


def _needed(item: pytest.Item) -> int:
    """The number of GPUs that the marker of a test names; 0 without one. Raises UsageError."""
    mark = item.get_closest_marker("gpus")
    if mark is None:
        return 0
    named = [*mark.args, *mark.kwargs.values()] or [1]
    if len(named) > 1 or set(mark.kwargs) - {"n"} or type(named[0]) is not int or named[0] < 0:
        raise pytest.UsageError(f"{item.nodeid}: the marker gpus takes one whole number, as in gpus(2).")
    return int(named[0])


def _may_distribute(options: Any) -> bool:
    return bool(getattr(options, "numprocesses", None) or getattr(options, "tx", None))


def _only_looks(options: Any) -> bool:
    return any(getattr(options, name, False) for name in LOOKS)


def _names(lease: HeldLease) -> str:
    return ", ".join(f"GPU {gpu.index}" for gpu in lease.gpus)


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"


def _refusal(error: Any) -> str:
    """What / why / what to do, in the words of someone who types a pytest command."""
    if error.code == "not_now":
        remedy = "Wait with --gpulease-wait=10m, or run the other tests with --gpulease-or-skip."
    else:
        remedy = f"{error.remedy} Without GPUs: --gpulease-or-skip.".strip()
    return f"--gpulease: {error.detail} {remedy}"


def _gpu_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        from argparse import ArgumentTypeError  # noqa: PLC0415

        raise ArgumentTypeError(f"{text!r} is no number of GPUs. Write --gpulease=1, or put --gpulease last.")
    return int(text)
