"""Walk 2: an administrator who makes a shared machine of one with GPUs. The installation is in tests/system."""

from __future__ import annotations

from tests.walks.walk import Walk

MISTAKES = """
    [serve]
    prot = 8750
    poll_s = "often"
    [nonsense]
    """


def configuration(walk: Walk) -> None:
    """The settings that count, and all mistakes of a file at once."""
    walk.file("root", "config.toml", MISTAKES)
    walk.step(
        "A17 all mistakes",
        "root",
        "gpulease config check --config config.toml",
        before="/root/config.toml:4: There is no section [nonsense] (the first mistake alone)",
        now=["prot", "nonsense"],
        code=None,
    )
    walk.step(
        "A17 no file",
        "root",
        "gpulease config check",
        before="there is no configuration file",
        now=["/etc/gpulease/config.toml"],
        code=None,
    )
    walk.step(
        "A17 what counts",
        "root",
        "gpulease config show",
        before="serve.data_dir - default",
        now=["data_dir +/var/lib/gpulease", "socket +/"],
        code=0,
    )


def without_a_worker(walk: Walk) -> None:
    """A daemon whose worker's unit was not copied."""
    walk.step(
        "A15 status",
        "ada",
        "gpulease status",
        before="No GPUs are known. (exit 0)",
        now=["no worker has reported"],
        code=None,
    )
    walk.step("A15 readyz", "ada", "curl -s http://127.0.0.1:8750/readyz", before='{"status":"ready"}', now=["worker"])
    walk.step(
        "A15 doctor",
        "root",
        "gpulease doctor",
        before="daemon: fine It answers and can grant.",
        now=["worker", "wrong"],
        code=None,
    )


def care(walk: Walk) -> None:
    """Taking a node out of use, tokens, and what doctor says."""
    node = "$(gpulease node list --json | jq -r '.items[0].name')"
    walk.step(
        "walk 2, a reason",
        "root",
        f"gpulease node drain {node} --reason 'driver update till 15:00'",
        before="No such option: --reason",
        now=["driver update"],
    )
    walk.step(
        "walk 2, what users see",
        "ada",
        "gpulease run -n 1 -- true",
        before="GPU 0 is on node vm, which an administrator drains. (one sentence for each GPU)",
        now=["driver update till 15:00", "root"],
        code=75,
    )
    walk.step("walk 2, back", "root", f"gpulease node resume {node}")
    walk.step(
        "walk 2, tokens",
        "root",
        "gpulease token create --user ada",
        before="(never expires, no word of that)",
        now=["expires"],
        code=None,
    )
    walk.step(
        "walk 2, someone else's database",
        "ada",
        "gpulease db backup x.db",
        before="There is no /home/ada/.local/share/gpulease/gpulease.db",
        now=["administrator"],
        code=None,
    )
    walk.step(
        "B6 a second daemon",
        "ada",
        "gpulease serve",
        before="Port 8750 of 127.0.0.1: Address already in use. do: Give another --port",
        now=["root", "gpulease status"],
        code=None,
    )
    walk.step(
        "walk 2, doctor",
        "root",
        "gpulease doctor",
        before="(wrong things between fine ones, no last line, no look at workers, units, certificates)",
        now=["worker"],
        code=None,
    )


def certificates(walk: Walk, url: str) -> None:
    """TLS with a certificate that no authority has signed."""
    walk.step(
        "A14 untrusted",
        "ada",
        f"gpulease --url {url} status",
        before="No daemon answers at https://localhost:8750 ([SSL: CERTIFICATE_VERIFY_FAILED] ...). do: Start one with gpulease serve",
        now=["--cacert", "trust"],
        code=None,
    )
    walk.step(
        "A14 plain HTTP to a TLS port",
        "ada",
        f"gpulease --url {url.replace('https', 'http')} status",
        before="broke off ... do: Look at its log: it may have been restarted",
        now=["https"],
        code=None,
    )
