"""docs/configuration.md and deploy/config.toml against the declarations, from which
`python -m tests.cli.test_configuration_page` writes the tables of the one and the whole of the other.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from gpulease_cli import settings
from gpulease_cli.option_types import Number
from gpulease_cli.program import PROGRAM
from gpulease_cli.sample_config import sample
from gpulease_protocol.host import config_file

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
SAMPLE = Path(__file__).parents[2] / "deploy" / "config.toml"
MADE = re.compile(r"(<!-- settings: .* -->\n).*?(<!-- end -->)", re.DOTALL)


def tables() -> str:
    """A table for each section."""
    return "".join(
        f"### [{section}]\n\n| key | option, variable | type | default | meaning |\n|---|---|---|---|---|\n"
        + "".join(row(option) for option in settings.declared(PROGRAM, section).values())
        + "\n"
        for section in config_file.SECTIONS
    )


def row(option: Any) -> str:
    names = "/".join([option.opts[0], *option.secondary_opts])
    meaning = (option.help or "").replace("|", "\\|")
    cells = (f"`{option.name}`", f"`{names}`, `{option.envvar}`", bounded(option), default(option), meaning)
    return f"| {' | '.join(cells)} |\n"


def bounded(option: Any) -> str:
    least, most = (option.type.minimum, option.type.maximum) if isinstance(option.type, Number) else (None, None)
    bounds = f", {least} to {most}" if most is not None else "" if least is None else f", at least {least}"
    return settings.kind(option) + bounds


def default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default.replace("|", "\\|")
    value = option.default
    if value is None:
        return "-"
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"`{shown}`"


def test_the_page_has_every_setting_as_it_is_declared() -> None:
    page = PAGE.read_text()
    written = MADE.search(page)
    assert written is not None
    assert written[0] == f"{written[1]}{tables()}{written[2]}", "run python -m tests.cli.test_configuration_page"


def test_every_option_of_the_daemon_and_its_worker_is_a_setting_with_a_variable() -> None:
    for section in ("serve", "worker"):
        without = [
            option.name
            for option in PROGRAM.commands[section].params
            if not option.envvar and not option.hidden and option.name != "help"
        ]
        assert without == [], f"give these options of {section} a variable, and docs/configuration.md a row"


def test_no_variable_is_one_that_kubernetes_sets_for_a_service_of_this_name() -> None:
    variables = {
        option.envvar for section in config_file.SECTIONS for option in settings.declared(PROGRAM, section).values()
    }
    assert "GPULEASE_PORT" not in variables
    assert not [name for name in variables if name.startswith(("GPULEASE_SERVICE_", "GPULEASE_PORT_"))]


def test_the_example_file_is_valid(tmp_path: Path) -> None:
    example = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "config.toml").write_text(example)
    sections = config_file.read(tmp_path / "config.toml")
    settings.check(PROGRAM, sections)
    assert {section: {key: entry.value for key, entry in keys.items()} for section, keys in sections.items()} == (
        tomllib.loads(example)
    )


def test_the_sample_file_shows_every_setting_with_its_default() -> None:
    assert SAMPLE.read_text() == sample(PROGRAM), "run python -m tests.cli.test_configuration_page"


def test_what_the_sample_file_shows_is_allowed(tmp_path: Path) -> None:
    """Without its `#`, every line counts; those whose default depends on the host hold a word for the kind of value."""
    words = re.compile(r'^#(\w+ = "[A-Z|@]+")$', re.MULTILINE)
    (tmp_path / "config.toml").write_text(
        re.sub(r"^#(\w+ = )", r"\1", words.sub("", SAMPLE.read_text()), flags=re.MULTILINE)
    )
    sections = config_file.read(tmp_path / "config.toml")
    settings.check(PROGRAM, sections)
    assert sections["serve"]["port"].value == 8750
    assert sum(map(len, sections.values())) > 30


def test_a_sample_with_chosen_settings_has_those(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(sample(PROGRAM, {"serve": {"admins": ["@sudo"]}}))
    sections = config_file.read(tmp_path / "config.toml")
    assert {key: entry.value for key, entry in sections["serve"].items()} == {"admins": ["@sudo"]}


if __name__ == "__main__":
    SAMPLE.write_text(sample(PROGRAM))
    PAGE.write_text(MADE.sub(lambda found: f"{found[1]}{tables()}{found[2]}", PAGE.read_text()))
