"""pytest plugin: which lane a test runs in, what runs beside what, and how long a test may take.

Lanes: `make test` runs the fast lane, `make test-slow` the tests marked `slow`, `make soak` those marked `soak`.
Within a lane, `-n 6 --dist loadgroup` runs six tests at once on two cores, because most long tests only wait:

- `busy` tests load the CPU. They form one group and run one at a time, beside tests that wait. Those marked
  `busy("compute")`, which compute in one process and measure no time, form another; so do `busy("torch")`, real
  trainings.
- `alone` tests measure time. They run in a second pass: in the fast lane with at most three of their kind beside them,
  in the slow lane one by one.
- The tests of a file or folder that share a daemon (any fixture of module or package scope) stay together, so that it
  starts once and ends with them.
- The groups that take longest start first, as far as budgets tell.

A budget is what a test takes on a quiet machine, fixtures included: 10 s in the fast lane, 60 s in the slow one, or
`@pytest.mark.budget(seconds)`. With CI=true the run fails if a test takes more than four times its budget, or more
still where other programs load the machine.
"""

from __future__ import annotations

import gc
import os
import re
import resource
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

BUDGETS_S = {"fast": 10.0, "slow": 60.0, "soak": 1000.0}
USUAL_S = {"fast": 0.5, "slow": 5.0, "soak": 100.0}
"""What a test without a budget takes as a rule."""
LARGEST_FAST_S = 30.0
"""A test that needs more belongs to the slow lane."""
ALLOWANCE, USUAL_LOAD = 4.0, 6.0
"""How many budgets a test may take, up to which load; more in proportion where other programs load the machine."""
LEAST_TIMEOUT_S = 300.0
"""A test that hangs is ended after this, or five budgets, so that a slow machine is not taken for a hang."""
SHOWN = 15
CPU_S = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--lane`."""
    lanes = [f"{name}{suffix}" for name in BUDGETS_S for suffix in ("", "-alone")]
    parser.addoption("--lane", choices=lanes, help="run this lane only: without, or only, the tests that run alone")


def lane(item: pytest.Item) -> str:
    """The lane of a test. A soak test may stand in a slow file; UsageError when the test itself names two lanes."""
    nodes: dict[pytest.Item | pytest.Collector, set[str]] = defaultdict(set)
    for node, mark in item.iter_markers_with_node():
        if mark.name in ("slow", "soak"):
            nodes[node].add(mark.name)
    if any(len(names) > 1 for names in nodes.values()):
        raise pytest.UsageError(f"{item.nodeid} is marked both slow and soak")
    closest = next(iter(nodes.values()), {"fast"})
    return next(iter(closest))


def budget_s(item: pytest.Item) -> float:
    """Seconds that a test takes on a quiet machine."""
    mark = item.get_closest_marker("budget")
    return float(mark.args[0]) if mark is not None else BUDGETS_S[lane(item)]


def weight_s(item: pytest.Item) -> float:
    """Seconds that a test adds to its group, by which the groups are ordered. Few take what they may; those that load
    the CPU wait for each other, so that theirs count as if they did."""
    marked = any(map(item.get_closest_marker, ("budget", "busy")))
    return budget_s(item) if marked else USUAL_S[lane(item)]


def group(item: pytest.Item) -> str | None:
    """Tests of one group run one after the other in one process; None for a test that may run anywhere."""
    if (named := item.get_closest_marker("xdist_group")) is not None:
        return str(named.args[0])
    if (busy := item.get_closest_marker("busy")) is not None:
        return " ".join(["busy", *busy.args])
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 - private, and there is no other
    shared = [found[-1] for found in fixtures if found and found[-1].baseid]
    of_package = [fixture.baseid for fixture in shared if fixture.scope == "package"]
    of_file = [item.nodeid.partition("::")[0] for fixture in shared if fixture.scope in ("module", "class")]
    return next(iter(of_package + of_file), None)


def check(item: pytest.Item) -> None:
    """Refuse markers that contradict each other."""
    if item.get_closest_marker("busy") and item.get_closest_marker("alone"):
        raise pytest.UsageError(f"{item.nodeid} is marked both busy and alone")
    if lane(item) == "fast" and budget_s(item) > LARGEST_FAST_S:
        raise pytest.UsageError(f"{item.nodeid} has a budget over {LARGEST_FAST_S:g} s: mark it slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file without a test of the lane: each process of tests would, and torch takes 2 s."""
    chosen = (config.getoption("lane") or "").split("-")
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    if "fast" in chosen and re.search(r"^pytestmark = .*mark\.(slow|soak)", text, re.MULTILINE):
        return True
    return True if any(f"mark.{word}" not in text for word in chosen if word not in ("", "fast")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and keep it from all that is there then, which lives until the end: of the
    CPU time in which a process collects it took a third, and later it would look at each item again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the markers, select the lane, form the groups, and put those that take longest first."""
    for item in items:
        check(item)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(LEAST_TIMEOUT_S, 5 * budget_s(item))))
    if (chosen := config.getoption("lane")) is not None:
        name, _, alone = chosen.partition("-")
        kept = [item for item in items if lane(item) == name and bool(item.get_closest_marker("alone")) == bool(alone)]
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
    if not getattr(config.option, "loadgroup", False):
        return
    groups = {item: group(item) for item in items}
    weights: dict[str, float] = defaultdict(float)
    for item, name in groups.items():
        weights[name or item.nodeid] += weight_s(item)
    items.sort(key=lambda item: -weights[groups[item] or item.nodeid])
    for item, name in groups.items():
        if name is not None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the CPU time before the test."""
    item.stash[CPU_S] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what a test may take and its CPU time to its last report; the JUnit file has them too."""
    report = yield
    if report.when == "teardown":
        allowed_s = budget_s(item) * ALLOWANCE * max(1.0, os.getloadavg()[0] / USUAL_LOAD)
        report.user_properties += [("allowed_s", round(allowed_s, 1))]
        report.user_properties += [("cpu_s", round(cpu_s() - item.stash[CPU_S], 2))]
    return report


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def pytest_configure(config: pytest.Config) -> None:
    """Record durations in the process that reports, and let it start the groups in the order made here."""
    config.option.loadscopereorder = False  # xdist would start those of the most tests first
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "durations")


class Durations:
    """What each test took: wall time with its fixtures, and CPU time."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = defaultdict(float)
        self.recorded: dict[str, dict[str, float]] = defaultdict(dict)
        """The time that it may take and its CPU time by test; nothing when the process that ran the test died."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self.wall_s[report.nodeid] += report.duration
        if report.when == "teardown":
            self.recorded[report.nodeid] = {
                name: float(str(value)) for name, value in report.user_properties if name in ("allowed_s", "cpu_s")
            }

    def over_budget(self) -> list[str]:
        """A line for each test that took too long."""
        return [
            f"{name} took {took_s:.1f} s, and may take {allowed_s:.1f} s"
            for name, took_s in self.wall_s.items()
            if took_s > (allowed_s := self.recorded[name].get("allowed_s", float("inf")))
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail over a budget. A lane of which nothing was selected has passed."""
        if session.exitstatus == pytest.ExitCode.OK and os.environ.get("CI") == "true" and self.over_budget():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("lane"):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the durations, and what is over budget."""
        if len(self.wall_s) > SHOWN:
            terminalreporter.section("wall and CPU seconds, fixtures included")
            for line in self.lines():
                terminalreporter.write_line(line)
        if over := self.over_budget():
            terminalreporter.section("over budget", red=True)
            for line in over:
                terminalreporter.write_line(line)

    def lines(self) -> Iterable[str]:
        """The sums of each folder, and the longest tests."""
        folders: dict[str, list[str]] = defaultdict(list)
        for name in self.wall_s:
            folders[name.partition("::")[0].rpartition("/")[0]].append(name)
        for folder, names in sorted(folders.items()):
            yield f"{self.sums(names)}  {folder}, {len(names)} tests"
        yield f"{self.sums(list(self.wall_s))}  all, {len(self.wall_s)} tests"
        for name in sorted(self.wall_s, key=self.wall_s.__getitem__, reverse=True)[:SHOWN]:
            yield f"{self.sums([name])}  {name}"

    def sums(self, names: list[str]) -> str:
        """Wall and CPU seconds of these tests."""
        cpu_s = sum(self.recorded[name].get("cpu_s", 0.0) for name in names)
        return f"{sum(self.wall_s[name] for name in names):9.1f} {cpu_s:9.1f}"
