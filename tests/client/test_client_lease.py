from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime

import pytest

from gpulease import Client, DaemonUnavailable, InvalidRequest, NotAuthenticated, NotNow
from gpulease import lease as lease_module
from gpulease.lease import HeldLease
from gpulease.sansio.direct_http import DirectHttp
from gpulease.sansio.effects import Attempt
from gpulease_protocol import endpoints
from gpulease_protocol.launchers import strip_launcher_variables
from gpulease_protocol.model import Liveness
from tests.client.fake_daemon import FakeDaemon
from tests.client.stalls import stalls


def test_a_lease_is_renewed_while_the_block_runs_and_released_once(daemon: FakeDaemon, client: Client, until) -> None:
    daemon.liveness = Liveness.PROCESS  # so that a machine that keeps this process from running loses no lease
    with stalls() as stalled_s:
        begun, before = time.monotonic(), set(threading.enumerate())
        with client.lease(1, ttl_s=4) as lease:
            until(lambda: lease.lost.is_set() or daemon.count("renew") >= 4)
            assert not lease.lost.is_set()
            assert 4 < time.monotonic() - begun < 12 + stalled_s(), "a few times in each ttl"
            assert lease.fencing_token == 7
            assert [gpu.uuid for gpu in lease.gpus] == ["GPU-0"]
        lease.release()
        assert daemon.count("release") == 1
        renewals = daemon.count("renew")
        assert not any(thread.name.startswith("gpulease-") for thread in set(threading.enumerate()) - before)
        assert daemon.count("renew") == renewals


def test_a_lease_ended_by_the_daemon_is_lost_at_once_and_reported_once(daemon, client, until, caplog) -> None:
    lost: list[HeldLease] = []
    with caplog.at_level(logging.WARNING, "gpulease"), client.lease(1, ttl_s=0.6, on_lost=lost.append) as lease:
        daemon.end(lease.id)
        assert lease.lost.wait(60)
        until(lambda: bool(lost))
    assert lost == [lease]
    assert len([record for record in caplog.records if "is lost" in record.message]) == 1


def test_a_holder_hears_soon_that_its_lease_has_ended_however_long_its_ttl(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lease_module.MAX_RENEWAL_PAUSE_S == 60, "docs/cli.md says so"
    monkeypatch.setattr(lease_module, "MAX_RENEWAL_PAUSE_S", 0.1)
    with client.lease(1, ttl_s=43200) as lease:
        daemon.end(lease.id)
        assert lease.lost.wait(60)


def test_a_holder_hears_that_its_lease_is_preempted_and_that_it_is_not(daemon, client, until, caplog) -> None:
    with caplog.at_level(logging.WARNING, "gpulease"), client.lease(1, ttl_s=3) as lease:
        assert lease.preempt_at is None
        daemon.only_lease()["preempt_at"] = "2026-01-01T12:00:00Z"
        assert lease.preempting.wait(60)
        assert lease.preempt_at == datetime(2026, 1, 1, 12, tzinfo=UTC)
        daemon.only_lease()["preempt_at"] = None
        until(lambda: not lease.preempting.is_set())
        assert lease.preempt_at is None
    assert caplog.text.count("ends at 2026-01-01 12:00:00 UTC for a request that waits") == 1
    assert caplog.text.count("is not preempted after all") == 1


@pytest.mark.alone
def test_a_lease_is_lost_if_no_renewal_succeeds_within_its_ttl(daemon: FakeDaemon, client: Client) -> None:
    with stalls() as stalled_s:
        begun = time.monotonic()
        lease = client.lease(1, ttl_s=1.6)
        daemon.fault = lambda line: "503" if "renew" in line else None
        assert lease.lost.wait(20)
        assert 1.5 < time.monotonic() - begun < 2.8 + stalled_s()
    assert daemon.count("renew") > 1
    lease.release()


@pytest.mark.alone
def test_a_lease_is_lost_in_time_even_if_name_resolution_hangs(daemon, monkeypatch) -> None:
    answer, resolved, down = socket.getaddrinfo, threading.Event(), threading.Event()

    def resolve(host: str, *more: object, **options: object) -> object:
        if down.is_set() and host == "gpus.lab":
            resolved.wait(30)
        return answer("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = f"http://gpus.lab:{daemon.port}"
    with stalls() as stalled_s, Client(url) as client:
        begun = time.monotonic()
        lease = client.lease(1, ttl_s=1)
        daemon.fault = lambda line: "break"
        down.set()
        assert lease.lost.wait(20)
        assert time.monotonic() - begun < 2 + stalled_s()
        daemon.fault = lambda line: None
        resolved.set()
        lease.release()


def test_a_lease_is_lost_in_time_even_if_renewing_raises_an_unexpected_error(client, monkeypatch, caplog) -> None:
    with client.lease(1, ttl_s=0.8) as lease:
        send = client.send

        def fail(call: endpoints.ApiCall[object], **bounds: float) -> object:
            if "renew" in call.path:
                raise RuntimeError("a defect")
            return send(call, **bounds)

        monkeypatch.setattr(client, "send", fail)
        assert lease.lost.wait(30)
    assert "a defect" in caplog.text


def test_a_holder_whose_token_is_revoked_hears_why_its_lease_is_lost_and_not_released(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = client.send

    def refuse(call: endpoints.ApiCall[object], **bounds: float) -> object:
        if "renew" in call.path or "release" in call.path:
            raise NotAuthenticated("That token is not valid.")
        return send(call, **bounds)

    def refuse_release(*words: object, **bounds: float) -> object:
        raise NotAuthenticated("That token is not valid.")

    monkeypatch.setattr(client, "send", refuse)
    monkeypatch.setattr(client, "release", refuse_release)
    with client.lease(1, ttl_s=0.5) as lease:
        assert lease.lost.wait(30)
        assert "succeeded for its ttl of 0.5 s. That token is not valid." in str(lease.loss_reason)
    assert "was not released; it lasts until its ttl or this process ends: That token is not valid." in caplog.text


def test_a_loss_is_not_put_down_to_a_failure_that_was_over(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    send, renewals, is_lost = client.send, itertools.count(), threading.Event()

    def fail_once_then_hang(call: endpoints.ApiCall[object], **bounds: float) -> object:
        if "renew" in call.path:
            number = next(renewals)
            if number == 0:
                raise DaemonUnavailable("The daemon is restarted.")
            if number > 1:
                is_lost.wait(30)
        return send(call, **bounds)

    monkeypatch.setattr(client, "send", fail_once_then_hang)
    with client.lease(1, ttl_s=2) as lease:
        assert lease.lost.wait(30)
        is_lost.set()
        assert str(lease.loss_reason).endswith("succeeded for its ttl of 2 s.")


def test_a_lease_of_a_daemon_without_bounds_is_watched(client: Client) -> None:
    with client.lease(1, ttl_s=1e300) as lease:
        for thread in lease._threads:
            thread.join(0.1)
            assert thread.is_alive(), "no wait is too long for it"


def test_closing_the_client_at_any_moment_loses_no_lease(
    daemon: FakeDaemon, client: Client, monkeypatch, until
) -> None:
    daemon.liveness = Liveness.PROCESS  # so that a machine that keeps this process from running loses no lease
    with client.lease(1, ttl_s=6) as lease:
        send = DirectHttp.send

        def close_and_send(connections: DirectHttp, attempt: Attempt) -> object:
            if "renew" in attempt.call.path and not daemon.count("renew"):
                monkeypatch.undo()
                client.close()
            return send(connections, attempt)

        monkeypatch.setattr(DirectHttp, "send", close_and_send)
        until(lambda: daemon.count("renew") >= 3)
        assert not lease.lost.is_set()


@pytest.mark.parametrize("expires", [False, True])
def test_programs_started_by_on_lost_block_no_signals(daemon, client, until, expires: bool) -> None:
    blocked: list[str] = []

    def start(lease: HeldLease) -> None:
        shown = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True, check=True)
        blocked.append(shown.stdout.split()[1])

    with client.lease(1, ttl_s=0.6, on_lost=start) as lease:
        if expires:
            daemon.fault = lambda line: "503" if "renew" in line else None
        else:
            daemon.end(lease.id)
        until(lambda: bool(blocked))
    assert [int(mask, 16) for mask in blocked] == [0]


def test_a_short_outage_loses_no_lease(daemon: FakeDaemon, client: Client, until) -> None:
    daemon.liveness = Liveness.PROCESS  # so that a machine that keeps this process from running loses no lease
    with client.lease(1, ttl_s=8) as lease:
        daemon.fault = lambda line: "503" if "renew" in line else None
        until(lambda: daemon.count("renew") >= 2)
        daemon.fault = lambda line: None
        seen = daemon.count("renew")
        until(lambda: daemon.count("renew") >= seen + 2)
        assert not lease.lost.is_set()


def test_a_lease_whose_renewals_a_newer_daemon_answers_in_another_shape_is_kept(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.liveness = Liveness.PROCESS  # so that a machine that keeps this process from running loses no lease
    with client.lease(1, ttl_s=3) as lease:
        known = dict(daemon.only_lease())
        daemon.only_lease()["liveness"] = {"of": "tomorrow"}
        assert not lease.lost.wait(4)
        daemon.only_lease()["liveness"] = known["liveness"]
    assert daemon.count("renew") >= 2


def test_a_failing_release_does_not_hide_the_exception_of_the_block(daemon, client, monkeypatch) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 0.3)
    with pytest.raises(KeyError), client.lease(1):  # noqa: PT012
        daemon.stop()
        raise KeyError("of the block")


def test_a_release_without_a_response_can_be_repeated(daemon: FakeDaemon, client: Client, monkeypatch) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 0.3)
    lease = client.lease(1)
    daemon.stop()
    with pytest.raises(DaemonUnavailable):
        lease.release()
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 60.0)
    daemon.start()
    lease.release()
    assert daemon.only_lease()["end_reason"] == "released"
    lease.release()
    assert daemon.count("release") <= 2, "by the caller, and as what is owed"
    assert not lease.lost.is_set()


def test_repeating_a_release_after_expiry_reports_no_loss(daemon, client, monkeypatch) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 0.3)
    lost: list[HeldLease] = []
    lease = client.lease(1, on_lost=lost.append)
    daemon.stop()
    with pytest.raises(DaemonUnavailable):
        lease.release()
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 60.0)
    daemon.start()
    daemon.end(lease.id)
    lease.release()
    assert not lost


def test_concurrent_releases_send_one_release(daemon: FakeDaemon, client: Client) -> None:
    lease = client.lease(1)
    threads = [threading.Thread(target=lease.release) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert daemon.count("release") == 1


def test_a_failing_release_does_not_fail_a_finished_block(daemon, client, caplog, monkeypatch) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 0.3)
    with client.lease(1):
        daemon.stop()
    assert "was not released" in caplog.text


def test_a_failing_on_lost_is_logged_and_the_lease_is_still_lost(daemon, client, until, caplog) -> None:
    def fail(lease: HeldLease) -> None:
        raise RuntimeError("of the callback")

    with client.lease(1, ttl_s=0.3, on_lost=fail) as lease:
        daemon.end(lease.id)
        until(lambda: "of the callback" in caplog.text)
        assert lease.lost.is_set()


def test_a_refusal_names_the_holder(daemon: FakeDaemon, client: Client) -> None:
    daemon.free = False
    with pytest.raises(NotNow, match="GPU 0 is leased to ada until 14:00") as refused:
        client.lease(1)
    assert refused.value.extra["explanation"]["obstacles"][0]["uuid"] == "GPU-0"
    assert not daemon.leases


def test_a_wait_that_times_out_names_the_holder_and_withdraws_the_request(daemon, client) -> None:
    daemon.free = False
    begun = time.monotonic()
    with pytest.raises(NotNow, match=r"within 0\.2 s.*leased to ada"):
        client.lease(1, wait_s=0.2)
    assert 0.2 <= time.monotonic() - begun < 20
    assert daemon.only_lease()["end_reason"] == "released"


def test_a_grant_ends_the_wait_at_once(daemon: FakeDaemon, client: Client, until) -> None:
    daemon.free = False
    granter = threading.Thread(
        target=lambda: (until(lambda: daemon.count("wait_while=queued") == 1), daemon.grant("L-1"))
    )
    granter.start()
    begun = time.monotonic()
    with client.lease(1, wait_s=60) as lease:
        assert time.monotonic() - begun < 30
        assert lease.id == "L-1"
    granter.join()


def test_a_grant_between_the_last_poll_and_the_withdrawal_is_taken(daemon: FakeDaemon, client: Client) -> None:
    daemon.free = False

    def grant_late(line: str) -> None:
        if "explain" in line:
            daemon.grant("L-1")

    daemon.fault = grant_late
    with client.lease(1, wait_s=0.1) as lease:
        assert lease.fencing_token == 7
    assert daemon.only_lease()["end_reason"] == "released"


@pytest.mark.parametrize("granted_meanwhile", [False, True])
def test_ctrl_c_while_waiting_withdraws_the_request(daemon, client, granted_meanwhile: bool) -> None:
    daemon.free = False

    def interrupt(line: str) -> None:
        if "wait_while=queued" in line:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if "release" in line and granted_meanwhile and daemon.only_lease()["state"] == "queued":
            daemon.grant("L-1")

    daemon.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        client.lease(1, wait_s=60)
    assert daemon.only_lease()["end_reason"] == "released"


def test_ctrl_c_before_the_answer_withdraws_what_was_granted(daemon: FakeDaemon, client: Client) -> None:
    faults = ["hang"]

    def interrupt(line: str) -> str | None:
        if line.startswith("POST /v1/leases?") and faults:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return faults.pop()
        return None

    daemon.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        client.lease(1)
    assert daemon.only_lease()["end_reason"] == "released"


@pytest.mark.parametrize(
    "wrong", [{"count": 0}, {"count": -1}, {"count": 1, "devices": 1}, {"ttl_s": 0}, {"count": "2"}]
)
def test_an_invalid_request_is_refused_before_it_is_sent(daemon, client, wrong) -> None:
    with pytest.raises(InvalidRequest):
        client.lease(**wrong)
    assert not daemon.request_lines


def test_the_environment_for_a_child_has_no_launcher_variables(client, monkeypatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "CUDA_LAUNCH_BLOCKING", "RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OF_MY_OWN", "stays")
    with client.lease(1) as lease:
        environ = lease.environ()
    assert environ["OF_MY_OWN"] == "stays"
    assert environ["GPULEASE_LEASE_ID"] == lease.id
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert not {
        "LOCAL_RANK",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID",
        "CUDA_LAUNCH_BLOCKING",
        "RANK",
    } & set(environ)


def test_stripping_launcher_variables_keeps_the_path_of_the_cuda_toolkit() -> None:
    assert strip_launcher_variables({"CUDA_HOME": "/cuda", "CUDA_VISIBLE_DEVICES": "1", "RANKING": "3"}) == {
        "CUDA_HOME": "/cuda",
        "RANKING": "3",
    }


def test_stripping_launcher_variables_takes_the_rank_of_mpirun_and_leaves_how_mpi_is_set_up() -> None:
    """Without a site's settings MPI may not start, and Lightning starts it where mpi4py is installed."""
    site = {
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PMIX_MCA_gds": "hash",
        "OMPI_MCA_mpi_cuda_support": "0",
    }
    rank = (
        *("OMPI_COMM_WORLD_RANK", "OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_pmix"),
        *("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_initial_wdir", "OMPI_MCA_shmem_RUNTIME_QUERY_hint", "OMPI_FIRST_RANKS"),
        *("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_URI41", "PMIX_GDS_MODULE", "PMI_RANK"),
    )
    assert strip_launcher_variables(site | dict.fromkeys(rank, "x")) == site


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_release_its_parents_lease(daemon: FakeDaemon, client: Client) -> None:
    with client.lease(1) as lease:
        child = os.fork()
        if child == 0:
            try:
                lease.release()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert daemon.count("release") == 0
    assert daemon.count("release") == 1


@pytest.mark.parametrize("child", ["", "import os; child = os.fork()\nif not child: raise SystemExit\nos.wait();"])
def test_a_program_releases_its_leases_at_exit(daemon: FakeDaemon, child: str) -> None:
    program = (
        f"import gpulease; lease = gpulease.Client({daemon.url!r}).lease(1)\n{child}\nassert not lease.lost.is_set()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert daemon.only_lease()["end_reason"] == "released"
    assert daemon.count("release") == 1
