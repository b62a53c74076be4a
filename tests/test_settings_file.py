"""The settings file: what it gives, what it refuses, and what writing to it leaves alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, ScriptedTurn

from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.resolving import resolve
from goinfer_chat.script import CommandLine
from goinfer_chat.settings import SETTINGS, Settings
from goinfer_chat.settings_file import read_settings_file, save_settings, template, to_toml
from goinfer_chat.slash.commands import COMMANDS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def from_file(file: Path, text: str, profile: str | None = None, **flags: object) -> Settings:
    file.write_text(text, encoding="utf-8")
    return resolve({"config": str(file), "profile": profile, **flags}, {})


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_flag_counts_before_a_variable_before_a_profile_before_the_file_before_the_default(file: Path) -> None:
    file.write_text(
        "top-k = 1\nmin_p = 0.1\nseed = 1\ntemperature = 1\n[profile.work]\ntop-k = 2\nmin-p = 0.2\nseed = 2"
    )
    flags = {"config": str(file), "profile": "work", "top_k": 4}
    sampling = resolve(flags, {"GOINFER_CHAT_TOP_K": "3", "GOINFER_CHAT_MIN_P": "0.3"}).sampling
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.temperature) == (4, 0.3, 2, 1.0)
    assert sampling.top_p == Settings().sampling.top_p


def test_every_kind_of_value_can_stand_in_the_file(file: Path) -> None:
    settings = from_file(
        file,
        'stop = ["a", "\\n"]\nquiet = true\nkv-cap = "500MB"\nctx = 100\nkeys = "vi"\nmax-tokens = "none"\n'
        'system = """\nTwo\nlines"""\n',
    )
    assert (settings.stop, settings.quiet, settings.kv_cap_bytes) == (("a", "\n"), True, 500_000_000)
    assert (settings.context_size, settings.keys, settings.max_tokens) == (100, "vi", None)
    assert settings.system == "Two\nlines"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tempreature = 1", r"config\.toml: there is no setting tempreature; did you mean temperature\?"),
        ("xyzzy = 1", r"there is no setting xyzzy; goinfer-chat config lists them"),
        ("[profile.work]\ntop-q = 1", r"\[profile\.work\]: there is no setting top-q; did you mean top-"),
        ("top-p = 9", r"config\.toml: top-p: top_p must be above 0"),
        ("top-k = 1.5", r"config\.toml: top-k: '1\.5' is not a whole number"),
        ("top-k = true", r"config\.toml: top-k: on is not a value it can have"),
        ("top-k = [1]", r"config\.toml: top-k: it takes neither a table nor a date nor a list"),
        ("stop = [1]", r"config\.toml: stop: several stop strings"),
        ("top-k = 2026-01-01", r"config\.toml: top-k: it takes neither a table nor a date nor a list"),
        ("api-key = 'x'", r"there is no setting api-key; no secret belongs in this file"),
        ("resume = 'x'", r"resume has its place on the command line, as --resume"),
        ("profile = 'x'", r"a profile is a table: \[profile\.NAME\]"),
        ("top-k = x\n", r"config\.toml is not TOML: .*line 1"),
        ("continue = true\nephemeral = true", r"only one of --continue"),
    ],
)
def test_what_cannot_be_obeyed_names_the_file_and_the_key(file: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_file(file, text)


def test_a_profile_that_is_not_there_is_suggested(file: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.toml has no profile 'wrok'; did you mean work\?"):
        from_file(file, "[profile.work]", "wrok")
    with pytest.raises(UsageError, match="has no profile 'play'; its profiles: work"):
        from_file(file, "[profile.work]", "play")
    with pytest.raises(UsageError, match="no profile 'work': there is no settings file"):
        resolve({"profile": "work"}, {})


def test_no_file_is_no_error_unless_it_was_chosen(file: Path) -> None:
    assert resolve({}, {}) == Settings()
    assert resolve({"config": "none"}, {}) == Settings(config="none")
    with pytest.raises(UsageError, match="there is no settings file"):
        resolve({}, {"GOINFER_CHAT_CONFIG": str(file)})


def test_bytes_that_are_no_text_and_a_folder_are_one_line(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        resolve({"config": str(file)}, {})
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        resolve({"config": str(tmp_path)}, {})


def test_a_flag_about_which_conversation_counts_before_the_file(file: Path) -> None:
    assert from_file(file, "ephemeral = true").ephemeral
    assert not from_file(file, "ephemeral = true", save="work").ephemeral


# -- the template ------------------------------------------------------------------------------------------------------


def test_the_template_changes_nothing_and_names_every_key(file: Path) -> None:
    assert tomllib.loads(template()) == {}
    for setting in SETTINGS:
        assert (f"\n# {setting.flag} = " in template()) == setting.in_file


def test_each_line_of_the_template_that_gives_a_default_can_be_taken_as_it_is(file: Path) -> None:
    settings = template().partition("\n# goinfer-chat --profile")[0]
    lines = [line[2:] for line in settings.splitlines() if line.startswith("# ") and " = " in line]
    named = ('"FILE"', '"DIR"', '"TEXT"', '"MODEL"', '"URL"', '"COMMAND"')
    real = [line for line in lines if line.split(" = ")[1] not in named]
    assert len(real) > 20
    assert from_file(file, "\n".join(real)) == Settings(config=str(file))


@given(st.text())
def test_any_text_survives_toml(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert tomllib.loads(f"value = {to_toml(text)}")["value"] == text


# -- writing -----------------------------------------------------------------------------------------------------------


def test_saving_leaves_comments_and_other_keys_as_they_are(file: Path) -> None:
    file.write_text("# mine\nseed = 1\ntop_k = 3 # few\n\n[profile.work]\ntop-k = 9\n# end\n")
    save_settings(file, {"top-k": 5, "temperature": 0.5})
    assert file.read_text() == ("# mine\nseed = 1\ntop-k = 5\ntemperature = 0.5\n\n[profile.work]\ntop-k = 9\n# end\n")
    save_settings(file, {"top-k": 7, "keys": "vi"}, "work")
    assert file.read_text().endswith('[profile.work]\ntop-k = 7\n# end\nkeys = "vi"\n')
    save_settings(file, {"stop": ("a", "\n")}, "new one")
    assert file.read_text().endswith('\n[profile."new one"]\nstop = ["a", "\\n"]\n')
    assert read_settings_file(str(file), "new one")["stop"] == ("a", "\n")


def test_saving_where_there_is_no_file_writes_the_template_with_the_value_in_place(tmp_path: Path) -> None:
    file = tmp_path / "new" / "config.toml"
    save_settings(file, {"top-k": 5})
    assert "\ntop-k = 5\n" in file.read_text()
    assert read_settings_file(str(file), None) == {"top_k": 5}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_of_many_that_save_at_once_none_loses_what_another_saved(file: Path) -> None:
    values = {"top-k": 5, "seed": 1, "temperature": 0.5, "keys": "vi", "top-p": 0.5, "min-p": 0.25, "max-tokens": 9}
    start = threading.Barrier(len(values))

    def save(flag: str) -> None:
        start.wait(10)
        save_settings(file, {flag: values[flag]})

    with ThreadPoolExecutor(len(values)) as pool:
        list(pool.map(save, values))
    saved = read_settings_file(str(file), None)
    assert {name.replace("_", "-"): value for name, value in saved.items()} == values
    assert os.listdir(file.parent) == [file.name]  # no lock stays


def test_a_link_to_the_file_stays_a_link(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("seed = 1\n")
    file.symlink_to(real)
    save_settings(file, {"seed": 2})
    assert file.is_symlink()
    assert real.read_text() == "seed = 2\n"


@pytest.mark.parametrize("text", ['system = """\nseed = 1\n"""\n', "stop = [\n  'a',\n]\n"])
def test_a_form_that_cannot_be_changed_line_by_line_is_left_as_it_is(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=r"change (seed|stop) there yourself"):
        save_settings(file, {"seed": 2} if "seed" in text else {"stop": ("b",)})
    assert file.read_text() == text


def test_save_settings_writes_what_the_chat_changed(file: Path) -> None:
    file.write_text("top-k = 3\n")
    agent = Agent(ScriptedEngine([ScriptedTurn()]), resolve({"config": str(file)}, {}))

    def run(line: str) -> str:
        name, _, argument = line.partition(" ")
        return COMMANDS.run(agent, CommandLine(name, argument)).text

    assert run("save-settings") == f"{file} has all of them already."
    run("temperature 0.1")
    assert run("save-settings") == f"Written to {file}: temperature."
    run("top-k 9")
    assert run("save-settings work") == f"Written to {file} under [profile.work]: top-k."
    assert file.read_text() == "top-k = 3\ntemperature = 0.1\n\n[profile.work]\ntop-k = 9\n"
    assert run("save-settings work") == f"{file} has all of them already under [profile.work]."


def test_save_settings_writes_what_differs_from_the_profile_it_writes_to(file: Path) -> None:
    file.write_text("top-k = 3\n\n[profile.work]\ntop-k = 9\n")
    agent = Agent(ScriptedEngine([ScriptedTurn()]), resolve({"config": str(file)}, {}))

    def save(profile: str) -> str:
        return COMMANDS.run(agent, CommandLine("save-settings", profile)).text

    assert save("work") == f"Written to {file} under [profile.work]: top-k."
    assert save("new").startswith(f"Written to {file} under [profile.new]: nothing that differs")
    assert file.read_text() == "top-k = 3\n\n[profile.work]\ntop-k = 3\n\n[profile.new]\n"
    assert resolve({"config": str(file), "profile": "new"}, {}).sampling.top_k == 3


# -- the command -------------------------------------------------------------------------------------------------------


def config(*arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    return subprocess.run(
        [sys.executable, "-m", "goinfer_chat", *arguments],
        capture_output=True,
        text=True,
        env=kept | {"XDG_CONFIG_HOME": str(home), "PYTHONWARNINGS": "error"} | env,
        timeout=30,
    )


def test_config_prints_writes_and_shows(tmp_path: Path) -> None:
    file = tmp_path / "goinfer-chat" / "config.toml"
    assert config("config", home=tmp_path).stdout == template()
    assert config("config", "path", home=tmp_path).stdout == f"{file}\n"
    assert config("config", "init", home=tmp_path).stdout == f"{file}\n"
    again = config("config", "init", home=tmp_path)
    assert (again.returncode, again.stderr) == (2, f"error: {file} already exists; choose another name\n")
    save_settings(file, {"seed": 1, "top-k": 2})
    save_settings(file, {"seed": 3}, "work")
    shown = config("--profile", "work", "config", "show", home=tmp_path, GOINFER_CHAT_MIN_P="0.5")
    assert shown.stdout.splitlines() == [
        "top-k = 2  # the file",
        "min-p = 0.5  # GOINFER_CHAT_MIN_P",
        "seed = 3  # profile work",
        'profile = "work"  # --profile',
    ]


def test_a_file_in_place_of_the_folder_is_named_and_another_place_can_be(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    done = config("config", "init", home=tmp_path / "taken")
    said = f"{tmp_path}/taken/goinfer-chat/config.toml cannot be written: {tmp_path}/taken is not a folder"
    assert (done.returncode, done.stderr) == (2, f"error: {said}; --config FILE names another place\n")
    with pytest.raises(UsageError, match=f"{tmp_path}/taken is not a folder; --config FILE names another place"):
        save_settings(tmp_path / "taken" / "config.toml", {"seed": 1})


def test_a_broken_file_is_one_line_and_code_2_and_config_path_still_answers(tmp_path: Path) -> None:
    file = tmp_path / "goinfer-chat" / "config.toml"
    file.parent.mkdir()
    file.write_text("top-q = 1")
    done = config("run", "hi", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {file}: there is no setting top-q; did you mean")
    assert config("config", "path", home=tmp_path).stdout == f"{file}\n"
