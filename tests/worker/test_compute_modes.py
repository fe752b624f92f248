"""EXCLUSIVE_PROCESS during a lease: set, restored, also after a crash, and never against an administrator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gpulease_protocol.model import ComputeMode, GpuReading, LeaseState
from gpulease_worker.probe.compute_modes import FILE, ComputeModes
from gpulease_worker.probe.probe_client import ProbeClient
from gpulease_worker.probe.probe_protocol import ComputeModeChange, ComputeModeNotSet, Pace
from gpulease_worker.processes.lease_cache import CachedLease
from tests.worker.build import GPUS
from tests.worker.stand_in import GPU_IS_LOST, HANGS, NO_PERMISSION, WHOLE
from tests.worker.stand_in import Driver as StandIn
from tests.worker.test_probe_client import reading_that

DEFAULT, EXCLUSIVE, PROHIBITED = ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED
BUS = "00000000:1B:00.0"


class Driver:
    """A GPU's mode, which the driver keeps across crashes of the worker; dies in a call on request."""

    def __init__(self, mode: ComputeMode = DEFAULT) -> None:
        self.mode = mode
        self.changes: list[ComputeMode] = []
        self.trouble: Exception | None = None
        self.mute = False

    async def change(self, change: ComputeModeChange) -> ComputeMode | None:
        if self.trouble is not None:
            raise self.trouble
        if self.mute:
            return None
        found = self.mode
        if found is change.expected:
            self.mode = change.mode
            self.changes.append(change.mode)
        return found


class Crash(Exception):
    """The worker ends here."""


def worker(tmp_path: Path, driver: Driver, *, manage: bool = True) -> ComputeModes:
    """A worker that has just started."""
    modes = ComputeModes(tmp_path, manage, driver.change)
    modes.recover()
    return modes


def turn(modes: ComputeModes, driver: Driver, *leases: CachedLease, times: int = 3) -> None:
    """Reconcile after readings of that GPU."""
    for _ in range(times):
        gpu = GpuReading(uuid=GPUS[0], node="n", index=0, pci_bus_id=BUS, compute_mode=driver.mode)
        asyncio.run(modes.reconcile(leases, [gpu]))


def lease(lease_id: str = "mine", state: LeaseState = LeaseState.ACTIVE) -> CachedLease:
    return CachedLease(id=lease_id, state=state, gpus=(GPUS[0],))


def kept(tmp_path: Path) -> list[str]:
    """The modes on disk that are to be restored."""
    return [gpu["mode"] for gpu in json.loads((tmp_path / FILE).read_text())["gpus"]]


def test_a_record_that_cannot_be_read_at_first_is_not_replaced_and_is_restored_later(tmp_path: Path) -> None:
    driver = Driver()
    turn(worker(tmp_path, driver), driver, lease())
    assert driver.mode is EXCLUSIVE
    content = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(content[:20])
    modes = worker(tmp_path, driver)
    driver.mode = DEFAULT
    turn(modes, driver, lease("next"))
    assert (driver.mode, (tmp_path / FILE).read_text()) == (DEFAULT, content[:20]), "nothing is changed meanwhile"
    (tmp_path / FILE).write_text(content)
    driver.mode = EXCLUSIVE
    turn(modes, driver)
    assert (driver.mode, kept(tmp_path)) == (DEFAULT, [])


def test_a_lease_makes_its_gpu_exclusive_until_the_gpu_is_clean(tmp_path: Path) -> None:
    driver = Driver()
    modes = worker(tmp_path, driver)
    turn(modes, driver)
    assert driver.mode is DEFAULT
    turn(modes, driver, lease())
    assert (driver.mode, kept(tmp_path)) == (EXCLUSIVE, ["default"])
    turn(modes, driver, lease(state=LeaseState.ENDED))
    assert driver.mode is EXCLUSIVE, "put back while something of the lease was left"
    turn(modes, driver)
    assert (driver.mode, kept(tmp_path)) == (DEFAULT, [])
    assert driver.changes == [EXCLUSIVE, DEFAULT]


def test_a_reading_from_before_the_mode_was_set_is_not_taken_for_an_administrator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    modes = worker(tmp_path, driver)
    old = GpuReading(uuid=GPUS[0], node="n", index=0, pci_bus_id=BUS, compute_mode=DEFAULT)
    for lease_id in ("one", "two"):
        turn(modes, driver, lease(lease_id), times=1)
        asyncio.run(modes.reconcile([lease(lease_id)], [old]))
        turn(modes, driver, lease(lease_id))
        turn(modes, driver)
    assert caplog.records == []
    assert driver.changes == [EXCLUSIVE, DEFAULT] * 2


def test_the_next_lease_takes_the_mode_over(tmp_path: Path) -> None:
    driver = Driver()
    modes = worker(tmp_path, driver)
    turn(modes, driver, lease("one"))
    turn(modes, driver, lease("two"))
    assert driver.mode is EXCLUSIVE
    turn(modes, driver)
    assert driver.changes == [EXCLUSIVE, DEFAULT]


@pytest.mark.parametrize("still_held", [True, False])
@pytest.mark.parametrize("when", ["before the mode was set", "after the mode was set"])
def test_a_crash_leaves_no_mode_behind(tmp_path: Path, when: str, still_held: bool) -> None:
    driver = Driver()
    if when == "before the mode was set":
        driver.trouble = Crash()
        with pytest.raises(Crash):
            turn(worker(tmp_path, driver), driver, lease())
        driver.trouble = None
    else:
        turn(worker(tmp_path, driver), driver, lease())
    assert kept(tmp_path) == ["default"], "the former mode is on disk before anything is changed"
    again = worker(tmp_path, driver, manage=False)
    if still_held:
        turn(again, driver, lease())
        assert driver.mode is EXCLUSIVE
    turn(again, driver)
    assert (driver.mode, kept(tmp_path)) == (DEFAULT, [])


def test_a_crash_between_putting_back_and_forgetting_does_no_harm(tmp_path: Path) -> None:
    driver = Driver()
    turn(worker(tmp_path, driver), driver, lease())
    driver.mode = DEFAULT
    turn(worker(tmp_path, driver), driver)
    assert (driver.mode, kept(tmp_path), driver.changes) == (DEFAULT, [], [EXCLUSIVE])


@pytest.mark.parametrize("chosen", [DEFAULT, PROHIBITED])
def test_an_administrator_who_changes_the_mode_of_a_leased_gpu_is_left_alone_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, chosen: ComputeMode
) -> None:
    driver = Driver()
    modes = worker(tmp_path, driver)
    turn(modes, driver, lease())
    driver.mode = chosen
    turn(modes, driver, lease())
    assert driver.mode is chosen
    (said,) = [record.message for record in caplog.records]
    assert said == f"the compute mode of {GPUS[0]} was set to {chosen} by someone else, and stays so"
    turn(modes, driver)
    assert (driver.mode, kept(tmp_path)) == (chosen, [])


@pytest.mark.parametrize("mode", [EXCLUSIVE, PROHIBITED])
def test_a_mode_other_than_the_default_was_set_on_purpose_and_stays(tmp_path: Path, mode: ComputeMode) -> None:
    driver = Driver(mode)
    modes = worker(tmp_path, driver)
    turn(modes, driver, lease())
    turn(modes, driver)
    assert (driver.mode, driver.changes) == (mode, [])


def test_a_driver_that_refuses_is_asked_once_for_each_lease(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.trouble = ComputeModeNotSet("it needs root", refused=True)
    modes = worker(tmp_path, driver)
    turn(modes, driver, lease())
    assert [record.message for record in caplog.records] == [f"cannot set the compute mode of {GPUS[0]}: it needs root"]
    assert kept(tmp_path) == []


def test_a_probe_that_hangs_is_asked_again(tmp_path: Path) -> None:
    driver = Driver()
    modes = worker(tmp_path, driver)
    driver.trouble = ComputeModeNotSet("the probe is starting")
    turn(modes, driver, lease())
    assert (driver.mode, kept(tmp_path)) == (DEFAULT, ["default"])
    driver.trouble = None
    turn(modes, driver, lease())
    assert driver.mode is EXCLUSIVE
    driver.trouble = ComputeModeNotSet("the probe is starting")
    turn(modes, driver)
    assert kept(tmp_path) == ["default"]
    driver.trouble = None
    turn(modes, driver)
    assert (driver.mode, kept(tmp_path)) == (DEFAULT, [])


def test_a_driver_that_does_not_tell_the_mode_is_asked_again_and_nothing_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    modes = worker(tmp_path, driver)
    driver.mute = True
    turn(modes, driver, lease())
    driver.mute = False
    turn(modes, driver, lease())
    assert driver.mode is EXCLUSIVE
    driver.mute = True
    turn(modes, driver)
    assert (driver.mode, kept(tmp_path)) == (EXCLUSIVE, ["default"])
    driver.mute = False
    turn(modes, driver)
    assert (driver.mode, kept(tmp_path)) == (DEFAULT, [])
    assert not [record for record in caplog.records if "someone else" in record.message]


def test_without_being_told_to_no_mode_is_touched(tmp_path: Path) -> None:
    driver = Driver()
    turn(worker(tmp_path, driver, manage=False), driver, lease())
    assert driver.changes == []
    assert not (tmp_path / FILE).exists()


def test_a_simulated_mode_changes_through_the_probe_until_the_file_names_another(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"

    def machine(mode: str) -> None:
        gpu = {"uuid": GPUS[0], "pci_bus_id": BUS, "compute_mode": mode}
        (tmp_path / "new").write_text(json.dumps({"gpus": [gpu]}))
        (tmp_path / "new").rename(path)

    async def story() -> None:
        probe = ProbeClient("n", str(path), 20.0)
        try:
            await reading_that(probe, problem=False)
            change = ComputeModeChange(pci_bus_id=BUS, expected=DEFAULT, mode=EXCLUSIVE)
            assert await probe.change_compute_mode(change) is DEFAULT
            assert (await probe.read(())).gpus[0].compute_mode is EXCLUSIVE
            assert await probe.change_compute_mode(change) is EXCLUSIVE, "it is not as expected any more"
            back = ComputeModeChange(pci_bus_id=BUS, expected=EXCLUSIVE, mode=DEFAULT)
            assert await probe.change_compute_mode(back) is EXCLUSIVE
            assert (await probe.read(())).gpus[0].compute_mode is DEFAULT
            await probe.change_compute_mode(change)
            machine("prohibited")
            assert (await probe.read(())).gpus[0].compute_mode is PROHIBITED
            with pytest.raises(ComputeModeNotSet, match="no GPU at 00000000:99"):
                await probe.change_compute_mode(
                    ComputeModeChange(pci_bus_id="00000000:99", expected=DEFAULT, mode=EXCLUSIVE)
                )
        finally:
            await probe.close()

    machine("default")
    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        pytest.param(0, None, id="it is done"),
        pytest.param(NO_PERMISSION, True, id="without root it is refused, and would be again"),
        pytest.param(GPU_IS_LOST, False, id="a lost GPU may come back"),
    ],
)
def test_the_driver_is_asked_by_bus_id_and_changes_only_what_is_as_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, refused: bool | None
) -> None:
    library = StandIn(tmp_path)
    library.install(monkeypatch)
    library.says(("nvmlDeviceSetComputeMode", 0, error))
    back = ComputeModeChange(pci_bus_id=WHOLE.pci_bus_id or "", expected=EXCLUSIVE, mode=DEFAULT)

    async def story() -> None:
        probe = ProbeClient("n", None, 20.0)
        try:
            before = await reading_that(probe, problem=False)
            assert [gpu.compute_mode for gpu in before.gpus] == [PROHIBITED, EXCLUSIVE]
            if refused is not None:
                with pytest.raises(ComputeModeNotSet) as refusal:
                    await probe.change_compute_mode(back)
                assert refusal.value.refused is refused
                assert ("requires root" in str(refusal.value)) is refused
                return
            assert await probe.change_compute_mode(back) is EXCLUSIVE
            assert await probe.change_compute_mode(back) is DEFAULT
            assert [gpu.compute_mode for gpu in (await probe.read(())).gpus] == [PROHIBITED, DEFAULT]
        finally:
            await probe.close()

    asyncio.run(story())


def test_a_call_that_hangs_while_a_mode_is_changed_is_named_and_the_probe_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandIn(tmp_path)
    library.install(monkeypatch)

    async def story() -> None:
        probe = ProbeClient("n", None, 20.0, Pace(call_deadline_s=2.0))
        try:
            await reading_that(probe, problem=False)
            library.says(("nvmlDeviceSetComputeMode", 0, HANGS))
            change = ComputeModeChange(pci_bus_id=WHOLE.pci_bus_id or "", expected=EXCLUSIVE, mode=DEFAULT)
            with pytest.raises(ComputeModeNotSet, match="nvmlDeviceSetComputeMode did not answer") as refusal:
                await probe.change_compute_mode(change)
            assert not refusal.value.refused
            assert (await reading_that(probe, problem=False)).gpus[1] == WHOLE
        finally:
            await probe.close()

    asyncio.run(story())
