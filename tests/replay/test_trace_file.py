"""Traces: what is read, and what each slip of the pen is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulease_protocol.model import Priority
from gpulease_server.replay import trace_file
from gpulease_server.replay.recorded_requests import uniform_nodes
from gpulease_server.replay.trace_file import TraceRefused, read_trace

HEAD = "asked_at_s,user,count,duration_s"
NODES = uniform_nodes(4, 8)


def written(directory: Path, text: str) -> Path:
    file = directory / "trace.csv"
    file.write_text(text)
    return file


def test_columns_may_be_in_any_order_and_comments_are_passed_over(tmp_path: Path) -> None:
    text = (
        "# from last month\npriority,count,user,duration_s,asked_at_s,time_s\nscavenge,2,ada,90,0.5,\n\n,1,bob,7,3,60\n"
    )

    first, second = read_trace(written(tmp_path, text), NODES).requests

    assert (first.user, first.asked_at_s, first.duration_s) == ("ada", 0.5, 90.0)
    assert (first.demand.count, first.demand.priority, first.demand.time_s) == (2, Priority.SCAVENGE, None)
    assert (second.demand.priority, second.demand.time_s) == (Priority.NORMAL, 60.0)


def test_more_gpus_than_a_node_has_take_whole_nodes(tmp_path: Path) -> None:
    text = f"{HEAD},nodes\n0,ada,8,1,\n0,ada,20,1,\n0,ada,2,1,3\n"

    demands = [one.demand for one in read_trace(written(tmp_path, text), NODES).requests]

    assert [(demand.count, demand.nodes) for demand in demands] == [(8, 1), (8, 3), (2, 3)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column asked_at_s"),
        ("asked_at_s,user,count\n0,ada,1\n", "no column duration_s"),
        (f"{HEAD},color\n", "the columns are asked_at_s, user, count, duration_s, color"),
        (f"{HEAD}\n0,ada,1\n", "line 2: it has 3 values for 4 columns"),
        (f"# one\n{HEAD}\n0,ada,1,5\n0,ada,one,5\n", "line 4: count is 'one', which is not a whole number"),
        (f"{HEAD}\n0,ada,0,5\n", "line 2: count is 0"),
        (f"{HEAD}\n-1,ada,1,5\n", "line 2: asked_at_s is -1"),
        (f"{HEAD}\n0,ada,1,nan\n", "line 2: duration_s is nan"),
        (f"{HEAD}\n0,ada,1,soon\n", "line 2: duration_s is 'soon', which is not a number"),
        (f"{HEAD},time_s\n0,ada,1,5,0\n", "line 2: time_s is 0"),
        (f"{HEAD},priority\n0,ada,1,5,urgent\n", "line 2: priority is 'urgent'; it must be one of interactive"),
    ],
    ids=lambda text: text.splitlines()[-1] if text else "empty",
)
def test_a_slip_of_the_pen_is_named_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(TraceRefused) as refused:
        read_trace(written(tmp_path, text), NODES)

    assert why in refused.value.detail
    assert HEAD in (refused.value.remedy or "")


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(TraceRefused, match="No such file"):
        read_trace(tmp_path / "none.csv", NODES)
    with pytest.raises(TraceRefused, match="UTF-8"):
        read_trace(tmp_path / "binary.csv", NODES)


def test_a_trace_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_REQUESTS", 2)

    with pytest.raises(TraceRefused, match="more than 2 requests"):
        read_trace(written(tmp_path, HEAD + "\n0,ada,1,5" * 3), NODES)
