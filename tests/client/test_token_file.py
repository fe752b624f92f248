"""A bearer token in a file, for the library, every command and the worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulease import Client
from gpulease.submitter import job_fields
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import token_file

TOKEN = "token-6434526eb94cfb23.Zm9v"


def written(path: Path, content: bytes = TOKEN.encode() + b"\n", mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def bearer(client: Client) -> str | None:
    return client.destination.bearer_token


def test_the_library_takes_the_token_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GPULEASE_TOKEN_FILE", written(tmp_path / "token"))
    with Client() as client:
        assert bearer(client) == TOKEN
    with Client(token="given") as client:
        assert bearer(client) == "given"
    monkeypatch.setenv("GPULEASE_TOKEN", "variable")
    with Client() as client:
        assert bearer(client) == "variable"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_a_file_that_a_group_of_ones_own_may_read_is_taken(tmp_path: Path, mode: int) -> None:
    assert token_file.read(written(tmp_path / "token", mode=mode), "x") == TOKEN


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666])
def test_a_file_that_others_may_read_or_change_is_refused_with_what_to_do(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "token", mode=mode)
    with pytest.raises(InvalidRequest, match="other users may read or change") as refused:
        token_file.read(path, "GPULEASE_TOKEN_FILE")
    assert refused.value.detail.startswith(f"GPULEASE_TOKEN_FILE: other users may read or change {path}")
    assert refused.value.remedy.startswith(f"chmod 600 {path}")


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff", b"x" * 5000, "tökén".encode()])
def test_what_is_no_token_is_not_sent(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidRequest, match="holds no token"):
        token_file.read(written(tmp_path / "token", content), "x")


@pytest.mark.parametrize("ending", ["\u201d", "\udcff", " b", "\nX: y", "\x07"])
def test_a_variable_that_holds_no_token_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    with pytest.raises(InvalidRequest) as of_argument:
        Client("http://127.0.0.1:9", token=f"secret{ending}")
    monkeypatch.setenv("GPULEASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GPULEASE_TOKEN", f"secret{ending}")
    with pytest.raises(InvalidRequest, match="GPULEASE_TOKEN: this is no token") as of_variable:
        Client()
    assert "secret" not in f"{of_argument.value}{of_variable.value}"
    monkeypatch.setenv("GPULEASE_TOKEN", f"{TOKEN}\r\n")
    with Client() as client:
        assert bearer(client) == TOKEN, "without the line break of the file that it came from"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for place, why in (
        (tmp_path / "fifo", "is no file"),
        (tmp_path, "is no file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            token_file.read(str(place), "x")


def test_a_job_inherits_nothing_that_leads_its_shell_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker may be on another host, with other files and another address of the daemon."""
    for name in ("URL", "TOKEN", "TOKEN_FILE", "CACERT"):
        monkeypatch.setenv(f"GPULEASE_{name}", "of this shell")
    monkeypatch.setenv("SEED", "3")
    found = job_fields({"GPULEASE_URL": "named for the job"})["environment"]
    named = {name: value for name, value in found.items() if name.startswith("GPULEASE_") or name == "SEED"}
    assert named == {"GPULEASE_URL": "named for the job", "SEED": "3"}
