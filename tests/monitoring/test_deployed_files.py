"""The alerts, the dashboard and the document speak of metrics that exist, in a language that Prometheus understands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.daemon import DaemonProcess
from tests.monitoring.conftest import steady
from tests.prometheus_scrape import ROOT, promtool

PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
CASES = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "gpulease.json").read_text())
DOCUMENT = (ROOT / "docs" / "monitoring.md").read_text()
PROMQL = re.findall(r"^```promql\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
STANDBY_ONLY = {"gpulease_copy_age_seconds"}
OURS = re.compile(r"\b(?:gpulease|process)_[a-z_]+\b")
FILLED = {"$__rate_interval": "5m", "$__range": "6h", "$job": ".+", "$instance": ".+"}


def expressions() -> list[str]:
    """Every query of the dashboard, with Grafana's variables filled in."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    for variable, value in FILLED.items():
        found = [expr.replace(variable, value) for expr in found]
    return found


def parses(place: Path, queries: list[str]) -> None:
    """Fails unless promtool can parse each."""
    rules = [{"record": f"query{number}", "expr": expr} for number, expr in enumerate(queries)]
    file = place / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stderr
    assert f"{len(queries)} rules found" in checked.stdout


def test_the_example_configuration_is_valid() -> None:
    checked = promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert checked.returncode == 0, checked.stderr
    assert "1 rule files found" in checked.stdout


def test_every_alert_fires_in_its_case_and_not_in_the_other() -> None:
    checked = promtool("test", "rules", str(PROMETHEUS / "alerts.test.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    cases = [one for case in CASES["tests"] for one in case["alert_rule_test"]]
    for name in RULES:
        expected = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name}
        assert expected == {True, False}, f"{name}: a case where it fires and one where it does not"


@pytest.mark.parametrize("wrong", ["({expr}) and on () (vector(0) > 1)", "vector(1)"], ids=["never", "always"])
def test_the_cases_notice_an_alert_that_is_wrong(wrong: str, tmp_path: Path) -> None:
    """All are wrong at once: each case looks at one alert, and promtool names every alert that fails."""
    (tmp_path / "alerts.test.yml").write_text((PROMETHEUS / "alerts.test.yml").read_text())
    broken = json.loads(json.dumps(ALERTS))
    for rule in broken["groups"][0]["rules"]:
        rule["expr"] = wrong.format(expr=rule["expr"])
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(broken))
    checked = promtool("test", "rules", str(tmp_path / "alerts.test.yml"))
    assert checked.returncode != 0
    noticed = set(re.findall(r"alertname: (\w+)", checked.stdout + checked.stderr))
    assert set(RULES) - noticed == set(), f"these pass with {wrong}"


def test_the_dashboard_asks_what_can_be_parsed_and_is_there(scene: DaemonProcess, tmp_path: Path) -> None:
    queries = expressions()
    assert len(queries) > 30
    assert "$" not in "".join(queries), "a variable that the test does not know"
    parses(tmp_path, queries)
    there = steady(scene).names()
    assert {name for query in queries for name in OURS.findall(query)} <= there
    variables = " ".join(str(variable["query"]) for variable in DASHBOARD["templating"]["list"])
    assert set(OURS.findall(variables)) <= there


def test_labels_that_the_dashboard_and_the_alerts_name_exist(scene: DaemonProcess) -> None:
    known = {"job", "instance", "le"}
    for family in steady(scene).families.values():
        known |= {label for sample in family.samples for label in sample.labels}
    queries = [*expressions(), *(rule["expr"] for rule in RULES.values())]
    lists = [words for query in queries for words in re.findall(r"(?:by|on|group_left)\s*\(([^)]*)\)", query)]
    assert {label.strip() for words in lists for label in words.split(",") if label.strip()} <= known
    shown = [target["legendFormat"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert set(re.findall(r"\{\{(\w+)\}\}", " ".join(shown))) <= known


def test_the_dashboard_has_the_shape_that_grafana_expects() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another"
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)
            assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "job", "instance"}
    assert DASHBOARD["id"] is None, "an export of someone's Grafana"


def test_alerts_ask_for_metrics_that_are_there(scene: DaemonProcess) -> None:
    there, text = steady(scene).names(), (PROMETHEUS / "alerts.yml").read_text()
    asked = {name for rule in RULES.values() for name in OURS.findall(rule["expr"])}
    assert len(asked) > 8
    assert asked <= there
    assert set(re.findall(r"gpulease_\w+(?=\{)", text)) <= there


def test_the_document_has_every_metric_as_the_daemon_tells_it(scene: DaemonProcess) -> None:
    rows = {row.split("`")[1]: row for row in re.findall(r"^\| `gpulease_.*\|$", DOCUMENT, re.MULTILINE)}
    told = steady(scene).rows()
    missing = "\n".join(row for name, row in told.items() if rows.get(name) != row)
    assert missing == "", f"docs/monitoring.md should say:\n{missing}"
    assert set(rows) - set(told) == STANDBY_ONLY


def test_the_document_names_every_alert() -> None:
    assert {name for name in RULES if f"`{name}`" not in DOCUMENT} == set()


def test_the_queries_of_the_document_can_be_parsed_and_ask_for_what_is_there(
    scene: DaemonProcess, tmp_path: Path
) -> None:
    assert len(PROMQL) >= 4
    parses(tmp_path, PROMQL)
    assert {name for query in PROMQL for name in OURS.findall(query)} <= steady(scene).names()


def test_the_joins_with_dcgm_exporter_find_the_holder(tmp_path: Path) -> None:
    joins = [query for query in PROMQL if "DCGM" in query]
    assert len(joins) == 2
    dcgm = 'UUID="GPU-1", gpu="0", device="nvidia0", modelName="H100", Hostname="a", job="dcgm", instance="a:9400"'
    ours = 'uuid="GPU-1", node="n1", job="gpulease", instance="a:8750"'
    for number, query in enumerate(joins):
        relabelled = "" if "label_replace" in query else ', uuid="GPU-1"'
        case = {
            "evaluation_interval": "15s",
            "tests": [
                {
                    "interval": "15s",
                    "input_series": [
                        {"series": f"DCGM_FI_DEV_GPU_UTIL{{{dcgm}{relabelled}}}", "values": "40x40"},
                        {"series": f"DCGM_FI_DEV_POWER_USAGE{{{dcgm}{relabelled}}}", "values": "300x40"},
                        {"series": f'gpulease_gpu_holder{{{ours}, user="ann"}}', "values": "1x40"},
                    ],
                    "promql_expr_test": [
                        {
                            "expr": query,
                            "eval_time": "5m",
                            "exp_samples": [
                                {"labels": '{user="ann"}', "value": 40 if "GPU_UTIL" in query else 300},
                            ],
                        }
                    ],
                }
            ],
        }
        file = tmp_path / f"join{number}.yml"
        file.write_text(yaml.safe_dump(case))
        checked = promtool("test", "rules", str(file))
        assert checked.returncode == 0, checked.stdout + checked.stderr
