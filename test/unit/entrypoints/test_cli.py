"""The console script."""

from __future__ import annotations

import pytest

from fenceline.cli import main
from fenceline.config import ConfigError
from fenceline.config.server_args import ServerArgs


def test_ctrl_c_while_starting_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: object, prog: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fenceline.launch_server.parse_args", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "fenceline serve: stopped while it was starting\n"


def test_serve_takes_the_model_as_its_first_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[ServerArgs] = []

    def resolve(args: ServerArgs) -> None:
        started.append(args)
        raise ConfigError("far enough")

    monkeypatch.setattr("fenceline.launch_server.resolve", resolve)
    with pytest.raises(SystemExit):
        main(["serve", "Qwen/Qwen3-0.6B", "--port", "0"])
    assert started == [ServerArgs(model_path="Qwen/Qwen3-0.6B", port=0)]
    assert capsys.readouterr().err == "fenceline serve: error: far enough\n"
