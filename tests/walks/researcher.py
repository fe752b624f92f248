"""Walk 1: a researcher on a shared machine, who types what every tool has taught them."""

from __future__ import annotations

import re

from tests.walks.walk import Walk

FIND = """
    import sys, time, gpulease
    print("devices", gpulease.find_usable_cuda_devices(int(sys.argv[1])), flush=True)
    time.sleep(float(sys.argv[2]))
    """
NOTEBOOK = """
    import gpulease
    print("devices", gpulease.find_usable_cuda_devices(1))
    print(gpulease.release())
    print("held", gpulease.reserved_leases() if hasattr(gpulease, "reserved_leases") else ())
    print([name for name in dir(gpulease) if name in ("sansio", "lease", "Any", "TYPE_CHECKING")])
    """
SWEEP = """
    #!/bin/sh
    #GPULEASE -n 2 --time 1h
    #GPULEASE --name from-the-script
    echo "GPUs: $CUDA_VISIBLE_DEVICES"
    """
NO_DAEMON = """
    (24 lines of traceback through devices, client, talk, transport, route)
    gpulease.errors.DaemonUnavailable: No daemon answers at http://127.0.0.1:8750 (Connection refused). Start one with
    `gpulease serve`, or set GPULEASE_URL."""
IN_USE = """
    (51 lines: three chained tracebacks, the same sentence three times)
    gpulease.errors.NotNow: You requested to find 2 devices but only 0 are currently available. The devices [0, 1, 2, 3]
    are occupied by other processes ... Device 0: GPU 0 of vm is held by lease-93a79e80351ef6ab (user root, pid 29627)
    until 2026-11-22 13:33:28 UTC unless it is renewed. ... (one sentence for each GPU)"""


def before_the_daemon(walk: Walk) -> None:
    """What a script and the program say while no daemon runs."""
    walk.file("ada", "find.py", FIND)
    walk.file("bob", "find.py", FIND)
    printed = walk.step("A1 no daemon", "ada", "python find.py 2 0", before=NO_DAEMON, now=["administrator"], code=1)
    assert frames(printed) <= 2, printed
    walk.step("A1 no daemon", "ada", "gpulease status", code=3, never=["Traceback"])


def errors_and_waits(walk: Walk) -> None:
    """GPUs in use, waiting for them, and giving up."""
    with walk.beside("bob", "python find.py 4 600") as bobs:
        bobs.wait_for("devices")
        printed = walk.step("A1 GPUs in use", "ada", "python find.py 2 0", before=IN_USE, now=["bob"], code=1)
        assert frames(printed) <= 2, printed
        assert printed.count("bob") == 1, printed
        printed = walk.step(
            "A1 Ctrl-C while it waits",
            "ada",
            "timeout -s INT 4 python find.py 2 0",
            before="(60 lines of traceback through httpcore)",
            now=["KeyboardInterrupt"],
            never=["httpcore"],
            code=None,
            GPULEASE_WAIT_S="10m",
        )
        assert frames(printed) <= 2, printed
        walk.step(
            "A3 the line while run waits, at 80 columns",
            "ada",
            "timeout -s INT 4 gpulease run -n 2 --wait 10m -- true",
            before="request lease-3e1f8e2a3b70f12d waits for 2s, place 1 in the queue: asked for...",
            now=["waiting [^\n]*bob"],
            code=None,
            terminal=True,
        )
        with walk.beside("ada", "python find.py 2 0", GPULEASE_WAIT_S="10m") as waits:
            waits.wait_for("bob")
            walk.step("A20 who waits", "ada", "gpulease queue", before="No such command 'queue'.", now=["ada"])
            bobs.end()
            waits.wait_for("devices")
            walk.saw(
                "A2 a wait is announced",
                "ada",
                "GPULEASE_WAIT_S=10m python find.py 2 0",
                "(nothing at all)",
                waits.output(),
                ["bob"],
            )


def what_people_submit(walk: Walk) -> None:
    """Commands, scripts and shell scripts, as other tools take them."""
    walk.file("ada", "train.py", "print('trained')")
    walk.file("ada", "train.sh", SWEEP)
    refused = """
        gpulease: the job was not submitted
          why: There is no script 'python' in /home/ada
          do:  Check its name, and the directory that you are in."""
    walk.step(
        "B4 submit python train.py",
        "ada",
        "gpulease submit -n 1 --name first -- python train.py",
        before=refused,
        now=["job-"],
    )
    walk.step(
        "B4 its end",
        "ada",
        "gpulease wait first && gpulease logs first",
        before="(no names: only ids of 20 characters)",
        now=["trained"],
    )
    walk.step(
        "B5 no torchrun there",
        "ada",
        "gpulease submit --interpreter /usr/bin/python3 train.py",
        before="job-2568e0c0ffee0000\n(accepted, fails, and `logs` prints nothing and exits 0)",
        now=["torch", "--interpreter"],
        code=None,
    )
    walk.step(
        "B5 a shell script with its options",
        "ada",
        "gpulease submit train.sh && gpulease wait from-the-script && gpulease logs from-the-script",
        before="job-...: (accepted for torchrun, fails; --launcher plain: There is no program 'train.sh' on PATH)",
        now=["GPUs: GPU-[^,]*,GPU-"],
    )
    walk.step(
        "A20 --dry-run",
        "ada",
        "gpulease submit --dry-run -n 2 -- python train.py",
        before="No such option: --dry-run",
        now=["[Ff]its now"],
    )
    walk.step(
        "A20 --dry-run, never", "ada", "gpulease submit --dry-run -n 9 -- python train.py", now=["[Nn]ever"], code=None
    )
    walk.step(
        "A20 --time, --after",
        "ada",
        'gpulease submit --name second --time 10m -- sh -c "until [ -e $PWD/explained ]; do sleep 0.1; done; echo second" && gpulease submit --name third --after second -- echo third && gpulease explain third && touch explained && gpulease wait third && gpulease logs third',
        before="No such option: --time / --after",
        now=["waits until job-", "third"],
    )
    walk.step(
        "A20 --notify",
        "ada",
        "gpulease submit --name told --notify 'echo $GPULEASE_JOB_STATE > told.txt' -- true && gpulease wait told; for i in $(seq 100); do [ -s told.txt ] && break; sleep 0.1; done; cat told.txt",
        before="(none)",
        now=["succeeded"],
    )
    walk.step(
        "walk 1, attempts",
        "ada",
        "gpulease submit --name twice --retries 1 -- sh -c 'exit 3'; gpulease wait twice; gpulease show twice",
        before="failed: The command exited with code 3. (nothing of the two attempts)",
        now=["attempt"],
        code=None,
    )


def names_and_habits(walk: Walk) -> None:
    """Ids, names, arrays, several at once, and the commands that other tools have."""
    walk.step(
        "A5 the beginning of an id",
        "ada",
        'gpulease explain "$(gpulease jobs --json | jq -r .items[0].id | cut -c1-9)"',
        before="There is no job job-2568e. It may have ended long ago: what is old is pruned.",
        now=["job-"],
        code=None,
    )
    walk.step(
        "A12 an array",
        "ada",
        "A=$(gpulease submit --array 0-2 --name sweep -- echo trial {index}) && gpulease wait $A && gpulease explain $A[1]; gpulease logs sweep[2]; gpulease show $A",
        before="There is no lease array-.... It may have ended long ago",
        never=["There is no lease"],
        now=["trial"],
        code=None,
    )
    with walk.beside("bob", "gpulease run -n 4 --label bobs-long-training-run -- sleep 600") as bobs:
        walk.until("bob", "gpulease status", "0 of 4 GPUs free")
        walk.step(
            "A4 status at 80 columns",
            "ada",
            "gpulease status",
            terminal=True,
            before="(every row wraps: the name of the model takes 21 columns, holder and until are cut off)",
            now=["bob"],
        )
        walk.step(
            "A20 jobs at 80 columns",
            "ada",
            "gpulease submit --name waits -- python train.py --with a very long line of arguments that goes on; gpulease jobs",
            terminal=True,
            before="(no time of the run, no reason, COMMAND wraps)",
            now=["waits"],
        )
        walk.step(
            "A13 logs of a job that waits",
            "ada",
            "gpulease logs waits",
            before="(empty, exit 0)",
            now=["bob|queue|wait"],
            code=None,
        )
        walk.step(
            "A20 queue, A18", "ada", "gpulease queue", terminal=True, before="No such command 'queue'.", now=["waits"]
        )
        walk.step(
            "A19 whose it is",
            "ada",
            'gpulease release "$(gpulease leases --json | jq -r \'.items[] | select(.state == "active").id\')"',
            before="Not allowed: It is another user's, and you are ada (user, known by socket).",
            now=["bob"],
            code=1,
        )
        walk.step(
            "A20 several at once",
            "ada",
            "A=$(gpulease submit -- true); B=$(gpulease submit -- true); gpulease cancel $A $B && gpulease cancel --mine --yes",
            before="Got unexpected extra argument",
            now=["job-"],
        )
        bobs.end()
    walk.until("ada", "gpulease status", "4 of 4 GPUs free")
    for words, pattern in (
        ("gpu list", "GPU-"),
        ("usage --since 7d", "ada"),
        ("jobs --mine -s succeeded", "third"),
        ("show first", "python train.py"),
        ("logs -n 1 first", "trained"),
        ("status --url http://localhost:8750", "free"),
        ("help run", "Examples"),
        ("version", "gpulease"),
    ):
        walk.step(
            f"A20 gpulease {words}", "ada", f"gpulease {words}", before="(no such command or option)", now=[pattern]
        )
    walk.step(
        "A11 examples in every --help",
        "ada",
        "for c in status cancel wait release renew explain 'gpu list' 'node drain' top queue; do gpulease $c --help | grep -A1 Examples || echo NONE $c; done",
        before="(not one example)",
        never=["NONE"],
    )
    walk.step(
        "walk 1, usage errors",
        "ada",
        "gpulease run -n two -- true; gpulease run -n 0 -- true; gpulease acquire --ttl 1000d; gpulease run --gres=gpu:1 -- true; gpulease squeue",
        before="Input should be a valid integer, unable to parse string as an integer / count: must be 1 to 4096, not 0",
        now=["whole number", "-n", "--ttl"],
        never=["count:", "Input should"],
        code=None,
    )


def shells_and_notebooks(walk: Walk) -> None:
    """Leases that belong to a shell, and what a notebook gives back."""
    walk.step(
        "A6 acquire belongs to its shell",
        "ada",
        "bash -c 'eval \"$(gpulease acquire -n 1)\"; gpulease leases'; for i in $(seq 50); do gpulease leases | grep -q pid || break; sleep 0.2; done; gpulease leases",
        before="root pid 28159 vm:1 in 1h 59m (the pid is that of the shell that has ended)",
        now=["active"],
    )
    walk.step(
        "A7, A8 release cleans the shell",
        "ada",
        'eval "$(gpulease acquire -n 1)"; eval "$(gpulease release)"; echo "mask=$CUDA_VISIBLE_DEVICES lease=$GPULEASE_LEASE_ID"',
        before="Missing argument 'LEASE' / mask=GPU-bf4c... (of the next holder)",
        now=["mask= lease=$"],
    )
    walk.step(
        "A7 a second acquire",
        "ada",
        'eval "$(gpulease acquire -n 1)"; eval "$(gpulease acquire -n 1)"',
        before="(silence; the first lease leaks)",
        now=["already"],
        code=None,
    )
    walk.file("ada", "notebook.py", NOTEBOOK)
    walk.step(
        "A9 a notebook gives back",
        "ada",
        "python notebook.py",
        before="AttributeError: module 'gpulease' has no attribute 'release'. Did you mean: 'lease'?",
        now=["devices", r"held \(\)", r"\[\]"],
    )
    walk.step(
        "A20 shell",
        "ada",
        "echo 'echo mask=$CUDA_VISIBLE_DEVICES; exit' | gpulease shell -n 1",
        before="No such command 'shell'.",
        now=["mask=GPU-"],
    )
    walk.step(
        "walk 1, not executable",
        "ada",
        "gpulease run -- ./train.py",
        before="there is no program './train.py' on PATH (exit 127)",
        now=["chmod"],
        code=126,
    )
    walk.step(
        "walk 1, a typed URL",
        "ada",
        "gpulease status --url nonsense://x",
        before="GPULEASE_URL: 'nonsense' is not the address",
        now=["--url"],
        code=2,
    )
    walk.step(
        "walk 1, a variable misspelt",
        "ada",
        "python find.py 1 0",
        before="(silence)",
        now=["GPULEASE_WAIT\\b"],
        GPULEASE_WAIT="60",
    )


def frames(printed: str) -> int:
    """How many frames a traceback has."""
    return len(re.findall(r'^  File "', printed, re.MULTILINE))
