"""The console script: its commands, their help, and that asking for it is cheap."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import setup_env
from fenceline import __version__
from fenceline.cli import main
from fenceline.config import ConfigError
from fenceline.config.flags import flags_of
from fenceline.config.server_args import ServerArgs

NUM_LINES = 24  # of the smallest screen


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints, which ends with status 0."""
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code
    output = capsys.readouterr()
    assert not output.err
    return output.out


def test_the_help_fits_a_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    assert len(text.splitlines()) <= NUM_LINES and max(map(len, text.splitlines())) <= 100
    commands = re.findall(r"(?m)^  ([\w-]+)  +[a-z]", text)
    assert {"serve", "chat", "bench", "trace", "completion"} <= set(commands)
    for command in commands:
        assert f"usage: fenceline {command}" in printed(capsys, command, "--help")


def test_the_help_of_serve_is_a_screen_and_the_rest_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, "serve", "--help")
    assert len(text.splitlines()) <= NUM_LINES and max(map(len, text.splitlines())) <= 80
    [names] = re.findall(r"explains the flags of ([^;]*);", text)
    groups = names.replace(",", "").split()
    assert text == printed(capsys, "serve", "demo", "-h") == printed(capsys, "serve", "--help=listgroup")

    def options(text: str) -> set[str]:
        return set(re.findall(r"(?m)^  (?:-h \S+ )?(--[\w-]+)", text))

    everything = options(printed(capsys, "serve", "--help=all"))
    assert everything == {flag.option for flag in flags_of(ServerArgs).values()} | {"--config", "--help"}
    shown = [options(printed(capsys, "serve", f"--help={group}")) for group in groups]
    assert set.union(*shown) == everything - {"--config", "--help"} and sum(map(len, shown)) == len(everything) - 2
    assert options(printed(capsys, "serve", "--help", "memory")) == shown[groups.index("memory")]
    assert options(printed(capsys, "serve", "--help=page_size")) == {"--page-size"}
    assert options(printed(capsys, "serve", "--help=page")) == {"--page-size", "--disable-web-page"}
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help=colour"])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--help=colour: no flag has it in its name" in line and "hicache" in line


def test_asking_for_help_imports_no_torch() -> None:
    code = """
import sys
from fenceline.cli import _COMMANDS, main
for words in (["--help"], ["--version"], *([name, "--help"] for name in _COMMANDS), ["completion", "bash"]):
    try:
        main(words)
    except SystemExit:
        pass
sys.exit(", ".join({"torch", "transformers", "fastapi"} & set(sys.modules)) or 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_changelog_begins_with_this_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"fenceline {__version__}\n"
    text = (setup_env.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"(?m)^## (.*)$", text)
    releases = [heading for heading in headings if heading != "[Unreleased]"]
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", releases[0])
    assert headings.index(releases[0]) <= 1
    kinds = set(re.findall(r"(?m)^### (.*)$", text))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_bench_is_what_it_measures_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("bench",), ("bench", "serve")):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--dataset-name", "sharegpt"])
        assert ended.value.code == 1
        assert "pass --dataset-path FILE" in capsys.readouterr().err


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "script"
    with file.open("w") as output:
        subprocess.run([sys.executable, "-m", "fenceline", "completion", "bash"], stdout=output, check=True, timeout=60)
    return file


BASH = """
source "$0"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_fenceline
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["s"], {"serve"}),
        (["serve", "de"], {"demo", "demo-moe", "demo-tools", "demo-vision"}),
        (["serve", "demo", "--served"], {"--served-model-name"}),
        (["serve", "--dtype", "float"], {"float", "float16", "float32"}),
        (["serve", "--dtype", "=", "b"], {"bfloat16"}),
        (["serve", "--help", "=", "h"], {"http", "hicache"}),
        (["serve", "--config", "p"], set()),
        (["bench", "--dataset-name", "random"], {"random", "random-ids"}),
        (["chat", "--model"], {"--model", "--model-name"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(bash_script: Path, words: list[str], expected: set[str]) -> None:
    command = ["bash", "-u", "-c", BASH, str(bash_script), "fenceline", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr, set(result.stdout.split())) == (0, "", expected)


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "completion", shell)
    options = [option for flag in flags_of(ServerArgs).values() for option in flag.options]
    for option in [*options, "--request-rate", "--system-prompt", "--output"]:
        begun = {"fish": f"-l {option[2:]}", "zsh": f"*{option}", "bash": option}[shell]
        assert re.search(rf"{re.escape(begun)}(?![\w-])", script), option
    assert "--no-disable-radix-cache" not in script, "which no help names"


ZSH = """
compdef() { }
_arguments() { print -rl -- "$@" }
source $1
words=(fenceline serve --dt) CURRENT=3
_fenceline
"""


def test_zsh_and_fish_read_their_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = []
    for shell, command in (("zsh", ["zsh", "-fec", ZSH, "zsh"]), ("fish", ["fish", "--no-config", "-c", FISH])):
        if shutil.which(shell) is None:
            missing.append(shell)
            continue
        file = tmp_path / shell
        file.write_text(printed(capsys, "completion", shell))
        result = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stderr) == (0, "")
        assert "dtype" in result.stdout and "bfloat16" in result.stdout, result.stdout
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


FISH = """
source $argv[1]
complete -C 'fenceline serve --dt'
complete -C 'fenceline serve --dtype b'
"""
