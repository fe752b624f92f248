"""10,000 GPUs held by 10,000 users: a scrape stays small by user, cheap, and out of the way of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_protocol.model import GpuReading, Holder
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.middleware.http_metrics import HttpMetrics
from gpulease_server.api.prometheus.metrics_endpoint import MetricsRenderer
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, NodeObservation, NodeRecord
from gpulease_server.runtime import clock
from gpulease_server.runtime.gpu_hours import MAX_USERS, OTHER_USERS
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
from tests.prometheus_scrape import Scrape
from tests.store.large_ledger import device, lease

pytestmark = [pytest.mark.slow, pytest.mark.alone]

GPUS, ON_A_NODE = 10_000, 8
GENEROUS_S = 20.0
BY_USER = ("gpulease_gpu_held_seconds_total", "gpulease_gpu_used_seconds_total", "gpulease_gpu_idle_seconds_total")


def great_ledger() -> Ledger:
    """Each GPU is leased to a user of its own, and its node has reported."""
    ledger, now_s = Ledger(), clock.now().mono_s
    for number in range(GPUS // ON_A_NODE):
        name, here = f"node-{number}", [device(number * ON_A_NODE + place) for place in range(ON_A_NODE)]
        readings = {
            one.uuid: GpuReading(uuid=one.uuid, node=name, index=one.index, utilization_ratio=0.5) for one in here
        }
        ledger.apply(NodeRecord(name=name, host="a"))
        ledger.apply(
            NodeObservation(
                node=name, worker_id="w", reported_at_s=now_s + 3600, observed_at_s=now_s, readings=readings
            )
        )
        for place, one in enumerate(here):
            token = number * ON_A_NODE + place + 1
            record = lease(token, (one,))
            record = replace(record, lease=replace(record.lease, holder=Holder(user=f"user{token}")))
            ledger.apply(record)
            ledger.apply(GpuRecord(device=one, lease_id=record.lease.id, fencing_token=token))
    return ledger


@pytest.fixture(scope="module")
def great(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonState]:
    """A daemon that has such a ledger, and does nothing."""
    url = f"sqlite:///{Path(tmp_path_factory.mktemp('great')) / 'ledger.db'}"
    upgrade(url)
    with closing(Store(url)) as store, closing(Writer(store, Policy())) as writer:
        writer.committed = great_ledger()
        writer.metrics.reset_usage(writer.committed, clock.now())
        for uuid in writer.metrics.usage.held:
            writer.metrics.usage.read(uuid, 0.5, clock.now().mono_s)
        yield DaemonState(
            writer=writer,
            store=store,
            tickets=DesiredStateTickets(),
            recorder=GpuMetricsRecorder(store, writer),
            host="a",
        )


def test_ten_thousand_users_do_not_make_ten_thousand_series(great: DaemonState) -> None:
    text = asyncio.run(MetricsRenderer(HttpMetrics()).render(great, as_openmetrics=False, accepts_gzip=False))
    told = Scrape(text.decode())
    assert told.value("gpulease_gpus", state="leased") == GPUS
    for name in BY_USER:
        assert len(told.by("user", name)) == MAX_USERS + 1
    active = told.by("user", "gpulease_leases", state="active")
    assert len(active) == MAX_USERS + 1
    assert active[OTHER_USERS] == GPUS - MAX_USERS
    assert sum(active.values()) == GPUS
    holders = {sample.labels["user"] for sample in told.families["gpulease_gpu_holder"].samples}
    assert len(holders) == MAX_USERS + 1
    assert told.series() < 7 * GPUS + 20 * (MAX_USERS + GPUS // ON_A_NODE)


@pytest.mark.parametrize("as_openmetrics", [False, True])
def test_requests_go_on_while_a_scrape_is_made(great: DaemonState, as_openmetrics: bool) -> None:
    gaps: list[float] = []

    async def go_on() -> None:
        while True:
            begun_s = time.perf_counter()
            await asyncio.sleep(0)
            gaps.append(time.perf_counter() - begun_s)

    async def main() -> float:
        renderer = MetricsRenderer(HttpMetrics())
        going = asyncio.create_task(go_on())
        begun_s = time.process_time()
        texts = await asyncio.gather(
            *(renderer.render(great, as_openmetrics=as_openmetrics, accepts_gzip=True) for _ in range(3))
        )
        spent_s = time.process_time() - begun_s
        going.cancel()
        assert all(text.startswith(b"\x1f\x8b") for text in texts)
        return spent_s

    spent_s = asyncio.run(main())
    print(
        f"three scrapes: {spent_s:.2f} s of processor with the loop's own, {len(gaps)} steps, longest {max(gaps):.3f} s"
    )
    assert len(gaps) > 30, "the loop stood still"
    assert max(gaps) < GENEROUS_S / 4
    assert spent_s < 3 * GENEROUS_S
