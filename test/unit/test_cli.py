"""The console script."""

from __future__ import annotations

import pytest

from fenceline.cli import main


def test_ctrl_c_while_starting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object, prog: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fenceline.launch_server.parse_args", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "fenceline serve: stopped while it was starting\n"
