"""What a daemon tells Prometheus, read as Prometheus would, and Prometheus' own tool."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.daemon import DaemonProcess

ROOT = Path(__file__).parents[1]
UNITS = {"seconds": "seconds", "bytes": "bytes"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Scrape:
    """One scrape: what it says, by family and by sample."""

    def __init__(self, text: str, *, openmetrics: bool = False) -> None:
        self.text = text
        parse = parse_openmetrics if openmetrics else parse_text
        self.families: dict[str, Metric] = {family.name: family for family in parse(text)}

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The values of a metric's samples with these labels, by one more label."""
        found = [sample for sample in self._samples(name) if labels.items() <= sample[0].items()]
        assert len({one[label] for one, _ in found}) == len(found), f"{name} has several for one {label}"
        return {one[label]: value for one, value in found}

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample that has these labels."""
        found = [value for one, value in self._samples(name) if labels.items() <= one.items()]
        assert len(found) == 1, f"{len(found)} samples of {name} have {labels}"
        return found[0]

    def names(self) -> set[str]:
        """Names of all samples, and of the histograms' that are read by quantile."""
        return {sample.name for family in self.families.values() for sample in family.samples}

    def series(self) -> int:
        """How many series there are."""
        return sum(len(family.samples) for family in self.families.values())

    def rows(self) -> dict[str, str]:
        """A row of docs/monitoring.md for each of gpulease's metrics."""
        return {name: _row(name, family) for name, family in _exposed(self.families) if name.startswith("gpulease")}

    def _samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        found = (sample for family in self.families.values() for sample in family.samples)
        return [(sample.labels, sample.value) for sample in found if sample.name == name]


def _exposed(families: dict[str, Metric]) -> list[tuple[str, Metric]]:
    suffixes = {"counter": "_total"}
    return [(name + suffixes.get(family.type, ""), family) for name, family in families.items()]


def _row(name: str, family: Metric) -> str:
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    unit = next((unit for unit in UNITS if unit in name.removesuffix("_total").split("_")[-1:]), "")
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {shown} | {unit} | {family.documentation} |"


def scrape(running: DaemonProcess, *, openmetrics: bool = False) -> Scrape:
    """Ask a daemon for its metrics."""
    answer = running.call("GET", "/metrics", **({"Accept": OPENMETRICS} if openmetrics else {}))
    assert answer.status == 200, answer.content
    return Scrape(answer.content.decode(), openmetrics=openmetrics)


def promtool(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run Prometheus' tool; `make test` puts it beside Python."""
    beside = Path(sys.executable).parent / "promtool"
    program = str(beside) if beside.exists() else shutil.which("promtool")
    assert program is not None, "there is no promtool: run `make promtool`"
    return subprocess.run([program, *words], input=stdin, capture_output=True, text=True, timeout=120, check=False)
