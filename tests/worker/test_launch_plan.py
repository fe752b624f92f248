"""The launch plan of a job, as tables: argument list, environment, and missing paths."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_protocol.model import JobSpec, Launcher, Mask
from gpulease_protocol.requests import JobRequest
from gpulease_worker.jobs import launch_plan, launcher_argv
from gpulease_worker.jobs.user_accounts import UserAccount
from tests.worker.build import GPUS, order, spec

LOGS = Path("/d/jobs/j/logs")


def planned(job: JobSpec, own: dict[str, str] | None = None, *, simulated: bool = False) -> launch_plan.LaunchPlan:
    return launch_plan.plan_launch(
        order("j", job, lease="L", port=21007, simulated=simulated),
        own={"PATH": "/bin", "HOME": "/home/eva"} if own is None else own,
        url="http://127.0.0.1:8750",
        python="/py",
        work=Path("/d/jobs/j/work"),
        logs=LOGS,
    )


def test_a_plain_command_is_run_as_it_is() -> None:
    plan = planned(spec("prog", "-x", "a b"))
    assert plan.argv == ("prog", "-x", "a b")
    assert plan.working_directory == "/d/jobs/j/work"


@pytest.mark.parametrize(("interpreter", "expected"), [(None, "/py"), ("/venv/bin/python", "/venv/bin/python")])
def test_torchrun_gets_the_leased_address_and_one_rank_for_each_gpu(interpreter: str | None, expected: str) -> None:
    job = spec("train.py", "--lr", "1", launcher=Launcher.TORCHRUN, interpreter=interpreter, working_directory="/w")
    plan = planned(job)
    assert plan.working_directory == "/w"
    assert plan.argv == (
        *(expected, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", "21007"),
        *("--log-dir", "/d/jobs/j/logs/torchrun", "--redirects", "3", "--tee", "3"),
        *("--no-python", "/bin/sh", "-c", launcher_argv.RANK_SCRIPT, "/d/jobs/j/logs"),
        *(expected, "-u", "train.py", "--lr", "1"),
    )


PORT = ("--master_addr", "127.0.0.1", "--master_port", "21007")
RANK = ("--no_python", "/bin/sh", "-c", launcher_argv.RANK_SCRIPT, "/d/jobs/j/logs", "/py", "-u")
ACCELERATE = ("/py", "-m", "accelerate.commands.launch", "--config_file", "/d/jobs/j/accelerate.json")
DEEPSPEED = ("/py", "-m", "deepspeed.launcher.runner", "--hostfile", "/dev/null", *PORT)
HOROVOD = ("/py", "-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2", "/py", "-u")
TORCHRUN_IN_ACCELERATE = (
    *(*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--gpu_ids", "all"),
    *("--main_process_ip", "127.0.0.1", "--main_process_port", "21007", "--max_restarts", "2"),
    *("--log_dir", "/d/jobs/j/logs/torchrun", "--tee", "3", *RANK),
)


@pytest.mark.parametrize(
    ("launcher", "command", "members", "expected"),
    [
        (Launcher.ACCELERATE, ("t.py", "-x"), {"max_restarts": 2}, (*TORCHRUN_IN_ACCELERATE, "t.py", "-x")),
        (Launcher.DEEPSPEED, ("t.py", "-x"), {}, (*DEEPSPEED, "t.py", "-x")),
        (Launcher.DEEPSPEED, ("-m", "pack.train"), {}, (*DEEPSPEED, "--module", "pack.train")),
        (Launcher.LIGHTNING, ("t.py", "-x"), {}, ("/py", "-u", "t.py", "-x")),
        (Launcher.FABRIC, ("-m", "pack.train"), {}, ("/py", "-u", "-m", "pack.train")),
        (Launcher.HOROVODRUN, ("t.py",), {}, (*HOROVOD, "t.py")),
        (
            *(Launcher.BAGUA, ("t.py",), {}),
            ("/py", "-m", "bagua.distributed.launch", "--nproc_per_node", "2", *PORT, "t.py"),
        ),
    ],
)
def test_every_launcher_gets_ranks_address_and_port_from_the_lease(
    launcher: Launcher, command: tuple[str, ...], members: dict[str, int], expected: tuple[str, ...]
) -> None:
    assert planned(spec(*command, launcher=launcher, **members)).argv == expected


def test_torchrun_may_restart_its_ranks() -> None:
    argv = planned(spec("t.py", launcher=Launcher.TORCHRUN, max_restarts=3)).argv
    assert argv[argv.index("--max-restarts") + 1] == "3"


def test_simulated_gpus_are_masked_by_their_position() -> None:
    plan = planned(spec("t.py", launcher=Launcher.DEEPSPEED), simulated=True)
    seen = plan.environment
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"], seen["LOCAL_SIZE"]) == ("2,5", "PCI_BUS_ID", "6")
    assert plan.indexed_gpus == ()


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(
    ("job", "by_index"),
    [
        (spec("t.py", launcher=Launcher.DEEPSPEED), True),
        (spec("t.py", launcher=Launcher.DEEPSPEED, mask=Mask.UUIDS), False),
        (spec("vllm", "serve", "m"), True),
        (spec("vllm", "serve", "m", mask=Mask.UUIDS), False),
        (spec("t.py", launcher=Launcher.TORCHRUN), False),
        (spec("t.py", launcher=Launcher.TORCHRUN, mask=Mask.INDICES), True),
    ],
)
def test_real_gpus_have_no_index_before_cuda_was_asked(job: JobSpec, by_index: bool, simulated: bool) -> None:
    plan = planned(job, simulated=simulated)
    assert plan.indexed_gpus == (GPUS if by_index and not simulated else ())
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == ("2,5" if by_index and simulated else ",".join(GPUS))


def test_accelerate_gets_its_own_configuration_in_place_of_the_users() -> None:
    config = json.loads(launcher_argv.accelerate_config(order("j", spec("t.py", launcher=Launcher.ACCELERATE))))
    assert (config["distributed_type"], config["num_processes"], config["gpu_ids"]) == ("MULTI_GPU", 2, "all")


@pytest.mark.parametrize(("asked", "expected"), [({}, "/srv/ca.pem"), ({"GPULEASE_CACERT": "/own.pem"}, "/own.pem")])
def test_a_job_trusts_what_its_worker_trusts(asked: dict[str, str], expected: str) -> None:
    task = order("j", spec("p", environment=asked))
    found = launch_plan.environment(task, {}, "https://gpubox:8750", ca_file="/srv/ca.pem")
    assert (found["GPULEASE_URL"], found["GPULEASE_CACERT"]) == ("https://gpubox:8750", expected)


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (spec("--num_gpus=2", "t.py", launcher=Launcher.DEEPSPEED), "--num_gpus=2 would take GPUs outside the lease"),
        (spec("--include", "localhost:0", "t.py", launcher=Launcher.DEEPSPEED), "--include would take GPUs outside"),
        (spec("--exclude", "localhost:0", "t.py", launcher=Launcher.DEEPSPEED), "--exclude would take GPUs outside"),
        (spec("--hostfile", "hosts", "t.py", launcher=Launcher.DEEPSPEED), "--hostfile would take GPUs outside"),
        (spec("--nnodes", "2", "t.py", launcher=Launcher.TORCHRUN), "not with the option --nnodes"),
        (spec("-m", launcher=Launcher.TORCHRUN), "-m needs something after it"),
        (spec("t.py", launcher=Launcher.LIGHTNING, max_restarts=1), "lightning cannot restart its ranks"),
    ],
)
def test_launcher_options_that_choose_gpus_outside_the_lease_are_refused(job: JobSpec, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        JobRequest(
            command=list(job.command),
            launcher=job.launcher.value,  # type: ignore[arg-type]
            max_restarts=job.max_restarts,
        )


@pytest.mark.parametrize(
    ("interpreter", "virtual", "expected"),
    [(None, None, "/py"), (None, "/eva/v", "/eva/v/bin/python"), ("/own/python", "/eva/v", "/own/python")],
)
def test_the_python_of_a_job_is_the_submitters(interpreter: str | None, virtual: str | None, expected: str) -> None:
    environment = {} if virtual is None else {"VIRTUAL_ENV": virtual}
    job = spec("t.py", launcher=Launcher.FABRIC, interpreter=interpreter, environment=environment)
    assert planned(job).argv[0] == expected


def test_another_users_job_has_that_users_home_and_not_the_workers() -> None:
    eva = UserAccount(uid=1005, gid=1005, name="eva", home="/home/eva", shell="/bin/zsh")
    own = {"HOME": "/root", "USER": "root", "TMPDIR": "/root/tmp", "PATH": "/bin"}
    seen = launch_plan.environment(order("j", spec("p", environment={"USER": "asked"})), own, "u", eva)
    assert (seen["HOME"], seen["LOGNAME"], seen["SHELL"], seen["USER"]) == ("/home/eva", "eva", "/bin/zsh", "asked")
    assert "TMPDIR" not in seen


def test_torchrun_without_a_leased_port_is_refused() -> None:
    bare = replace(order("j", spec("t.py", launcher=Launcher.TORCHRUN)), env={})
    with pytest.raises(ValueError, match="no MASTER_ADDR and no MASTER_PORT"):
        launcher_argv.argv(bare, "/py", LOGS)


@pytest.mark.parametrize(
    "name",
    [
        *("LOCAL_RANK", "RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LT_DEVICES"),
        *(
            "NODE_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_WORLD_SIZE",
            "ROLE_RANK",
            "ROLE_NAME",
            "PET_NNODES",
            "PET_RDZV_BACKEND",
        ),
        *("GPULEASE_FOUND_BY", "GPULEASE_PARENT_PID"),
        *("ACCELERATE_USE_CPU", "CUDA_LAUNCH_BLOCKING", "GPULEASE_LEASE_TOKEN", "MASTER_TIMEOUT"),
    ],
)
def test_variables_of_another_training_are_not_inherited(name: str) -> None:
    assert name not in planned(spec("p"), own={name: "1"}).environment


@pytest.mark.parametrize(
    ("name", "own", "asked", "expected"),
    [
        ("SECRET", "x", None, None),
        ("VIRTUAL_ENV", "/of/the/worker", None, None),
        ("LC_ALL", "C.UTF-8", None, "C.UTF-8"),
        ("HOME", "/home/eva", None, "/home/eva"),
        ("HOME", "/home/eva", "/tmp", "/tmp"),
        ("CUDA_LAUNCH_BLOCKING", None, "1", "1"),
        ("CUDA_HOME", "/cuda", None, "/cuda"),
        ("LOCAL_RANK", None, "3", None),
        ("SLURM_PROCID", None, "1", None),
        ("PET_NNODES", "2", "2", None),
        ("GPULEASE_FOUND_BY", None, "3", None),
        ("CUDA_VISIBLE_DEVICES", "0", "1", ",".join(GPUS)),
        ("MASTER_PORT", "1", "2", "21007"),
        ("GPULEASE_LEASE_ID", "other", "other", "L"),
        ("GPULEASE_JOB_ID", "other", None, "j"),
        ("PYTHONUNBUFFERED", None, None, "1"),
        ("GPULEASE_URL", "http://elsewhere", None, "http://127.0.0.1:8750"),
        ("GPULEASE_URL", None, "http://asked", "http://asked"),
        ("OMP_NUM_THREADS", None, None, None),
    ],
)
def test_the_job_overrides_the_workers_environment_and_the_lease_overrides_both(
    name: str, own: str | None, asked: str | None, expected: str | None
) -> None:
    job = spec("p", environment={} if asked is None else {name: asked})
    assert planned(job, own={} if own is None else {name: own}).environment.get(name) == expected


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (spec("true"), None),
        (spec("./tool"), None),
        (spec("no-such-program"), "The program 'no-such-program' was not found on PATH"),
        (spec("./notes.txt"), "The program './notes.txt' was not found in"),
        (spec("true", working_directory="/no/such/place"), "The working directory /no/such/place does not exist"),
        (spec("train.py", launcher=Launcher.TORCHRUN), None),
        (spec("-m", "package.train", launcher=Launcher.TORCHRUN), None),
        (spec("absent.py", launcher=Launcher.TORCHRUN), "The script 'absent.py' was not found in"),
        (
            spec("train.py", launcher=Launcher.TORCHRUN, interpreter="/no/python"),
            "The interpreter '/no/python' was not",
        ),
    ],
)
def test_a_missing_path_is_reported_in_a_sentence(tmp_path: Path, job: JobSpec, complaint: str | None) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "tool").touch(mode=0o755)
    task = order("j", job)
    plan = launch_plan.plan_launch(
        task, own={"PATH": "/usr/bin:/bin"}, url="u", python=sys.executable, work=tmp_path, logs=tmp_path / "logs"
    )
    found = launch_plan.missing_path(plan)
    assert (found is None) if complaint is None else (found is not None and complaint in found)
