"""A real cluster of Ray on this host while stdin is open: a GCS, and raylets whose GPUs are only declared.

Runs with the Python of the tools (`make tools`). Arguments: a port, settings of Ray. Each line on stdin is a command,
answered by a line of JSON:

| command | what it does |
|---|---|
| `show` | nothing |
| `raylet` | starts one more raylet |
| `gcs` | starts the GCS again, on its port, after it was killed |
| `cluster` | starts a new cluster on the same port, as an administrator does after the GCS was lost |

It is the parent of every process that loses its own, and leaves none of them behind.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ray.cluster_utils import Cluster

from gpulease_protocol.host.process_tree import adopt_orphans, descendants, kill_all
from tests.ports import free_port

GPUS = 8
NODE = {
    "num_cpus": 0,
    "num_gpus": GPUS,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "wait": False,
}
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""A raylet does not wait for long until its agents have chosen theirs, as they do where these are not given."""
REAP_S = 0.1
START_S, END_S = 240.0, 60.0


def words() -> Iterator[str]:
    """The commands. Between them it reaps what has ended, so that no zombie passes for a process that lives."""
    unread = b""
    while True:
        if not select.select([0], [], [], REAP_S)[0]:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            continue
        if not (more := os.read(0, 4096)):
            return
        *lines, unread = (unread + more).split(b"\n")
        yield from (line.decode().strip() for line in lines)


def started(port: int, config: dict[str, Any]) -> Cluster:
    """A cluster of one node."""
    head = node() | {"gcs_server_port": port, "_system_config": config}
    cluster = Cluster(initialize_head=True, shutdown_at_exit=False, head_node_args=head)
    cluster._wait_for_node(cluster.head_node, START_S)
    return cluster


def node() -> dict[str, Any]:
    """What a raylet is started with."""
    return NODE | {name: free_port() for name in PORTS}


def shown(cluster: Cluster) -> dict[str, Any]:
    """Its address, and the pids of its GCS and its raylets, first the one that pools talk to."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, *cluster.worker_nodes)]
    return {
        "address": cluster.address,
        "gcs": cluster.head_node.all_processes["gcs_server"][0].process.pid,
        "raylets": raylets,
    }


def main(port: int, config: dict[str, Any]) -> None:
    """Obey the commands until stdin ends, then end everything."""
    adopt_orphans()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints there
    try:
        cluster = started(port, config)
        print(json.dumps(shown(cluster)), file=answers, flush=True)
        for word in words():
            if word == "raylet":
                cluster._wait_for_node(cluster.add_node(**node()), START_S)
            elif word == "gcs":
                cluster.head_node.kill_gcs_server(check_alive=False)
                cluster.head_node.start_gcs_server()
            elif word == "cluster":
                cluster = started(port, config)
            print(json.dumps(shown(cluster)), file=answers, flush=True)
    finally:
        kill_all(lambda: descendants(os.getpid()), END_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
