"""Shell completion, run by bash."""

import subprocess

import pytest

from jaxche.cli import main


@pytest.fixture
def complete(tmp_path, capsys):
    """What bash offers after some words."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def ask(*words):
        quoted = " ".join(f"'{word}'" for word in words)
        program = f"""
        source {script}
        COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
        $(complete -p jaxche | sed -E 's/.*-F ([^ ]+).*/\\1/') jaxche '{words[-1]}' '{words[-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
        return {word.strip() for word in done.stdout.split()}

    return ask


def test_completion_of_commands_options_and_values(complete):
    assert {"train", "report", "launch", "coordinator", "doctor", "simulate", "plan"} <= complete("jaxche", "")
    assert complete("jaxche", "tr") == {"train"}
    assert {"--policy", "--protocol"} <= complete("jaxche", "train", "--p")
    assert complete("jaxche", "train", "--policy", "") == {"sync", "cadence", "async", "auto"}


def test_completion_of_directories(complete, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "notes.txt").touch()
    assert complete("jaxche", "report", "") >= {"runs"}
    assert "notes.txt" not in complete("jaxche", "report", "n")
    for option in ("--out", "--replay", "--store"):
        assert complete("jaxche", "train", option, "") == {"runs"}
    assert complete("jaxche", "doctor", "--store", "") == {"runs"}


@pytest.mark.parametrize(
    ("command", "option"), [("report", "--out"), ("simulate", "-o"), ("launch", "--events"), ("launch", "-n")]
)
def test_completion_of_files(complete, command, option, tmp_path):
    (tmp_path / "notes.txt").touch()
    assert ("notes.txt" in complete("jaxche", command, option, "n")) == (option != "-n")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "jaxche" in capsys.readouterr().out
