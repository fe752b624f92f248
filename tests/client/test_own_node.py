"""Which of the daemon's nodes is this host."""

from __future__ import annotations

import socket

import pytest

from gpulease import own_node as own_node_module
from gpulease.own_node import node_to_ask_for, nodes_here, own_node
from gpulease_protocol.errors import NeverFits
from gpulease_protocol.model import Node, NodeState

HERE = "11111111-1111-1111-1111-111111111111/pid:[1]"
CONTAINER_HERE = "11111111-1111-1111-1111-111111111111/pid:[2]"
ELSEWHERE = "22222222-2222-2222-2222-222222222222/pid:[1]"
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_node_module, "realm", lambda: HERE)


def node(name: str, realm: str | None, host: str = HOST) -> Node:
    return Node(name=name, state=NodeState.READY, gpu_count=2, host=host, realm=realm)


class Nodes:
    """A daemon with these nodes."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes


def names(*nodes: Node) -> list[str]:
    return [one.name for one in nodes_here(nodes)]


def test_a_host_that_has_the_same_name_is_another_host() -> None:
    assert names(node("n1", ELSEWHERE), node("n2", HERE)) == ["n2"]
    assert names(node("n1", ELSEWHERE)) == []


def test_a_host_is_found_under_whatever_name_its_node_has() -> None:
    assert names(node("gpubox", HERE, host="a-container")) == ["gpubox"]


def test_a_worker_in_a_container_of_this_host_is_here_but_one_beside_this_process_comes_first() -> None:
    assert names(node("inside", CONTAINER_HERE, host="a-container")) == ["inside"]
    assert names(node("inside", CONTAINER_HERE), node("outside", HERE)) == ["outside"]


def test_without_a_realm_as_from_an_older_daemon_the_name_of_the_host_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(node("n1", None), node("n2", None, host="another")) == ["n1"]
    monkeypatch.setattr(own_node_module, "realm", lambda: None)
    assert names(node("n1", ELSEWHERE), node("n2", ELSEWHERE, host="another")) == ["n1"]


def test_of_several_nodes_of_this_host_the_one_that_is_named_as_the_host_is_its_own() -> None:
    found = own_node([node("a", HERE), node(HOST, HERE)])
    assert found is not None
    assert found.name == HOST


def test_where_all_nodes_are_here_none_is_asked_for() -> None:
    assert node_to_ask_for(Nodes(node("a", HERE), node("b", HERE)), None, must_be_here=True) is None
    assert node_to_ask_for(Nodes(), None, must_be_here=True) is None


def test_where_others_are_elsewhere_the_own_one_is_asked_for() -> None:
    both = Nodes(node("a", ELSEWHERE), node("b", HERE))
    assert node_to_ask_for(both, None, must_be_here=True) == "b"
    assert node_to_ask_for(both, None, must_be_here=False) == "b"
    assert node_to_ask_for(both, "a", must_be_here=True) == "a"
    assert node_to_ask_for(both, "any", must_be_here=True) is None


def test_where_none_is_here_only_a_command_that_runs_here_is_refused() -> None:
    elsewhere = Nodes(*(node(f"n{number}", ELSEWHERE) for number in range(5)))
    assert node_to_ask_for(elsewhere, None, must_be_here=False) is None
    with pytest.raises(NeverFits, match="n0, n1, n2 and 2 more") as refused:
        node_to_ask_for(elsewhere, None, must_be_here=True)
    assert "gpulease submit" in str(refused.value.remedy)
