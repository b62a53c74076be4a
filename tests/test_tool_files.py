"""The built-in tools on files: what they read, how they change a file, and the folder nothing leaves."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import Journal, Registry, Root, ToolContext, ToolResult, ToolSetupError
from tools.root import Place, _Walk

ARGUMENTS = {
    "search": {"pattern": "secret"},
    "edit_file": {"old": "secret", "new": "public"},
    "write_file": {"content": "public"},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src/main.py").write_text("import os\n\n\ndef main():\n    return 1\n")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def context(project: Path, tmp_path: Path) -> ToolContext:
    return ToolContext(root=Root(project), timeout_seconds=20, journal=Journal(tmp_path / "kept"), key="call")


@pytest.fixture
def call(context: ToolContext) -> Any:
    registry = Registry.built_in()
    return lambda name, **arguments: registry.call(name, json.dumps(arguments), context)


# Reading


def test_a_file_is_read_whole_or_by_lines(call: Any) -> None:
    assert call("read_file", path="src/main.py") == ToolResult(
        "ok", "src/main.py, lines 1-5, to the end\nimport os\n\n\ndef main():\n    return 1"
    )
    assert call("read_file", path="src/main.py", first_line=4, last_line=4).text == (
        "src/main.py, lines 4-4\ndef main():"
    )
    assert call("read_file", path="./src/../src//main.py", first_line=5, last_line=99).text == (
        "src/main.py, lines 5-5, to the end\n    return 1"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "src/mian.py"}, "there is no file src/mian.py; near it: src/main.py"),
        ({"path": "nowhere/a.py"}, "there is no folder nowhere"),
        ({"path": "src"}, "src is a folder"),
        ({"path": "src/main.py/x"}, "src/main.py is not a folder"),
        ({"path": "src/main.py", "first_line": 9}, "src/main.py has 5 lines, so there is no line 9"),
        ({"path": "src/main.py", "first_line": 3, "last_line": 2}, "last_line 2 is before first_line 3"),
        ({"path": "src/main.py", "first_line": 0}, "wrong arguments: first_line: 0 is less than the minimum of 1"),
        ({"path": ""}, "'' is not a path"),
        ({"path": "a\0b"}, "'a\\x00b' is not a path"),
        ({"path": "\ud800"}, "'\\ud800' is not a path"),
        ({"path": "x" * 5000}, "x"),
    ],
)
def test_what_cannot_be_read_is_a_result_that_says_why(call: Any, arguments: dict[str, Any], message: str) -> None:
    result = call("read_file", **arguments)
    assert result.status == "error"
    assert result.text.startswith(message)


def test_a_long_file_is_read_in_parts_that_fit(call: Any, project: Path) -> None:
    (project / "long.txt").write_text("".join(f"this is line {number}\n" for number in range(1, 5001)))
    first = call("read_file", path="long.txt").text
    assert len(first) < 12_200
    about = first.splitlines()[0]
    next_line = int(about.rpartition(" ")[2])
    assert about == f"long.txt, lines 1-{next_line - 1}; for more call again with first_line {next_line}"
    assert call("read_file", path="long.txt", first_line=next_line).text.splitlines()[1] == f"this is line {next_line}"


def test_one_endless_line_is_cut(call: Any, project: Path) -> None:
    (project / "line.txt").write_text("x" * 1_000_000 + "\nend\n")
    text = call("read_file", path="line.txt").text
    assert len(text) < 13_000
    assert "the rest of this line is left out" in text


def test_a_huge_file_costs_neither_memory_nor_time(call: Any, project: Path) -> None:
    with open(project / "huge.txt", "wb") as file:
        file.write(b"a line\n" * 2000)
        file.truncate(1 << 40)  # sparse
    assert call("read_file", path="huge.txt", last_line=2).text == "huge.txt, lines 1-2\na line\na line"
    assert (
        "1,099,511,627,776 bytes, which is too much to edit"
        in call("edit_file", path="huge.txt", old="a", new="b").text
    )


def test_binary_files_are_named_and_wrong_bytes_replaced(call: Any, project: Path) -> None:
    (project / "a.bin").write_bytes(b"\x7fELF\0\0")
    (project / "latin.txt").write_bytes(b"caf\xe9\r\nok")
    assert call("read_file", path="a.bin") == ToolResult("error", "a.bin is a binary file of 6 bytes")
    assert call("read_file", path="latin.txt").text.splitlines()[1:] == ["caf\ufffd", "ok"]


def test_files_are_listed_without_what_programs_made(call: Any, project: Path) -> None:
    for name in (".git/config", "src/__pycache__/main.pyc", "b.txt", ".hidden", "src/deep/x.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / "link").symlink_to("/etc")
    assert call("list_files").text.splitlines() == [
        "files in .:",
        ".hidden",
        "b.txt",
        "link -> /etc",
        "src/main.py",
        "src/deep/x.py",
        "[not listed: .git/, src/__pycache__/]",
    ]
    assert call("list_files", path="src", pattern="*.py").text.splitlines()[:3] == [
        "files in src:",
        "main.py",
        "deep/x.py",
    ]
    assert call("list_files", pattern="*.rs").text == "no file in . matches *.rs"


def test_a_list_of_very_many_files_is_cut(call: Any, project: Path) -> None:
    for number in range(700):
        (project / f"{number:04}.txt").touch()
    assert call("list_files").text.endswith("[more than 500 files; name a folder below, or give a pattern]")


@pytest.fixture
def very_deep(project: Path) -> Iterator[None]:
    """1,500 folders within each other: more than a path may name, than may be open, and than Python calls."""
    here = os.open(project, os.O_RDONLY)
    for level in range(1500):
        os.mkdir("d", dir_fd=here)
        if level == 90:
            with open(os.open("needle.txt", os.O_CREAT | os.O_WRONLY, dir_fd=here), "w") as file:
                file.write("a needle\n")
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    yield
    subprocess.run(["rm", "-rf", str(project / "d")], check=True)  # what Python has for it goes too deep


@pytest.mark.usefixtures("very_deep")
def test_a_list_goes_only_so_deep_and_says_where_it_stopped(call: Any) -> None:
    listed = call("list_files")
    assert listed.status == "ok"
    assert f"{'d/' * 90}needle.txt" in listed.text.splitlines()
    assert listed.text.splitlines()[-1] == f"[not listed: {'d/' * 101}]"


# The folder


@pytest.mark.parametrize("path", ["../secret.txt", "src/../../secret.txt", "/etc/passwd", "out/secret.txt", "outside"])
@pytest.mark.parametrize("tool", ["read_file", "list_files", "search", "edit_file", "write_file"])
def test_no_path_leads_out_of_the_folder(call: Any, project: Path, tool: str, path: str) -> None:
    (project / "out").symlink_to("..")
    (project / "outside").symlink_to(project.parent / "secret.txt")
    result = call(tool, path=path, **ARGUMENTS.get(tool, {}))
    assert result.status == "error"
    assert "of this project; give paths from it" in result.text
    assert (project.parent / "secret.txt").read_text() == "secret"


def test_links_that_stay_inside_are_followed_and_stay_links(call: Any, project: Path) -> None:
    (project / "alias").symlink_to("src/../src")
    (project / "main").symlink_to(project / "src/main.py")
    assert "import os" in call("read_file", path="alias/main.py").text
    assert call("edit_file", path="main", old="return 1", new="return 2").status == "ok"
    assert (project / "main").is_symlink()
    assert "return 2" in (project / "src/main.py").read_text()


def test_links_in_a_circle_end(call: Any, project: Path) -> None:
    (project / "a").symlink_to("b")
    (project / "b").symlink_to("a")
    assert call("read_file", path="a").text.endswith("too many links")


def test_an_absolute_path_inside_is_understood(call: Any, project: Path) -> None:
    assert "import os" in call("read_file", path=str(project / "src/main.py")).text
    assert call("read_file", path=f"{project}-other/x").status == "error"


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_plain_file_is_neither_opened_nor_replaced(
    call: Any, project: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(project)  # the address of a socket is short
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("odd")
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root makes devices")
    before = path.lstat().st_mode
    for name, arguments in [
        ("read_file", {}),
        ("edit_file", {"old": "a", "new": "b"}),
        ("write_file", {"content": ""}),
        ("search", {"pattern": "a"}),
    ]:
        result = call(name, path="odd", **arguments)
        assert (result.status, result.text) == ("error", "odd is not a plain file")
    assert path.lstat().st_mode == before


@pytest.mark.parametrize("tool", ["read_file", "write_file", "edit_file", "search", "list_files"])
def test_a_folder_that_becomes_a_link_after_it_was_looked_at_lets_nothing_out(
    call: Any, project: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = project.parent / "outside"
    (outside / "deep").mkdir(parents=True)
    (project / "src/deep").mkdir()
    for folder in (outside, project / "src"):
        (folder / "deep/a.txt").write_text(f"secret of {folder.name}")
    looked_at = _Walk._link

    def exchange(walk: _Walk, name: str) -> str | None:
        target = looked_at(walk, name)
        if name == "src":
            (project / "src").rename(project / "before")
            (project / "src").symlink_to(outside)
        return target

    monkeypatch.setattr(_Walk, "_link", exchange)
    path = "src/deep" if tool in ("search", "list_files") else "src/deep/a.txt"
    result = call(tool, path=path, **ARGUMENTS.get(tool, {}))
    assert result == ToolResult("error", "src is not a folder")
    assert (outside / "deep/a.txt").read_text() == "secret of outside"


@pytest.mark.parametrize("tool", ["read_file", "edit_file", "write_file", "search"])
@pytest.mark.parametrize("becomes", ["link", "pipe"])
def test_a_file_that_becomes_something_else_after_it_was_looked_at_is_not_opened(
    call: Any, project: Path, tool: str, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "src/main.py"
    looked_at = Place.info

    def exchange(place: Place) -> os.stat_result | None:
        found = looked_at(place)
        if place.path == "src/main.py":
            path.unlink(missing_ok=True)
            path.symlink_to("../../secret.txt") if becomes == "link" else os.mkfifo(path)
        return found

    monkeypatch.setattr(Place, "info", exchange)
    result = call(tool, path="src/main.py", **ARGUMENTS.get(tool, {}))
    assert result.status == "error"
    assert "secret" not in result.text
    assert (project.parent / "secret.txt").read_text() == "secret"


def test_the_folder_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ToolSetupError, match="cannot be the folder of the tools"):
        Root(tmp_path / "missing")


# Changing


def test_an_edit_replaces_what_occurs_once_and_keeps_permissions(call: Any, project: Path) -> None:
    path = project / "src/main.py"
    path.chmod(0o751)
    result = call("edit_file", path="src/main.py", old="    return 1\n", new="    x = 2\n    return x\n")
    assert result == ToolResult("ok", "src/main.py: replaced; 1 line more")
    assert path.read_text() == "import os\n\n\ndef main():\n    x = 2\n    return x\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert [entry.name for entry in path.parent.iterdir()] == ["main.py"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return 3", "x", "old does not occur in src/main.py; read the file"),
        ("  return 1", "x", ""),
        ("\treturn 1", "x", "old does not occur in src/main.py; line 5 has its first line with other spaces"),
        ("n", "x", "old occurs 2 times in src/main.py, at lines 4, 5"),
        ("\n\n", "x", "old occurs 2 times in src/main.py, at lines 1, 2"),
        ("", "x", "old is empty"),
        ("import os", "import os", "old and new are the same"),
    ],
)
def test_an_edit_that_does_not_fit_exactly_once_changes_nothing(
    call: Any, project: Path, old: str, new: str, message: str
) -> None:
    before = (project / "src/main.py").read_text()
    result = call("edit_file", path="src/main.py", old=old, new=new)
    assert result.status == ("error" if message else "ok")
    if message:
        assert result.text.startswith(message), result.text
        assert (project / "src/main.py").read_text() == before


def test_line_ends_and_bytes_that_are_no_text_are_kept(call: Any, project: Path) -> None:
    path = project / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\xff\r\nthree\r\n")
    assert call("edit_file", path="dos.txt", old="one\n", new="1\n1.5\n").status == "ok"
    assert path.read_bytes() == b"\xef\xbb\xbf1\r\n1.5\r\ntwo\xff\r\nthree\r\n"
    assert call("edit_file", path="dos.txt", old="three", new="3\n4").status == "ok"
    assert path.read_bytes().endswith(b"3\r\n4\r\n")
    assert call("write_file", path="dos.txt", content="a\nb\n").status == "ok"
    assert path.read_bytes() == b"a\r\nb\r\n"


def test_a_file_is_made_with_its_folders(call: Any, project: Path) -> None:
    assert call("write_file", path="new/deep/a.txt", content="é\n") == ToolResult(
        "ok", "new/deep/a.txt: made, 1 line, 3 bytes"
    )
    assert (project / "new/deep/a.txt").read_text() == "é\n"
    assert call("write_file", path="src", content="x").text == "src is a folder; list_files shows what is in it"


def test_a_change_shows_as_a_diff_before_it_is_made(context: ToolContext, project: Path) -> None:
    registry = Registry.built_in()
    edit = registry.get("edit_file").preview({"path": "src/main.py", "old": "return 1", "new": "return 2"}, context)
    assert edit is not None
    assert edit.splitlines()[:2] == ["--- a/src/main.py", "+++ b/src/main.py"]
    assert edit.splitlines()[-2:] == ["-    return 1", "+    return 2"]
    made = registry.get("write_file").preview({"path": "new/a.txt", "content": "hi\n"}, context)
    assert made == "--- /dev/null\n+++ b/new/a.txt\n@@ -0,0 +1 @@\n+hi"
    assert not (project / "new").exists()
    assert registry.get("edit_file").preview({"path": "src/main.py", "old": "nothing", "new": ""}, context) is None
    assert registry.get("read_file").preview({"path": "src/main.py"}, context) is None


def test_somebody_elses_change_is_not_overwritten(
    call: Any, project: Path, context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "src/main.py"
    keep = Journal.keep

    def meanwhile(self: Journal, *arguments: Any) -> None:
        keep(self, *arguments)
        path.write_text("somebody else was here\n")

    monkeypatch.setattr(Journal, "keep", meanwhile)
    result = call("edit_file", path="src/main.py", old="return 1", new="return 2")
    assert result == ToolResult("error", "src/main.py was changed meanwhile; read it again")
    assert path.read_text() == "somebody else was here\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["main.py"]


# Taking back


def test_changes_are_taken_back_the_last_one_first(call: Any, context: ToolContext, project: Path) -> None:
    before = (project / "src/main.py").read_bytes()
    call("edit_file", path="src/main.py", old="return 1", new="return 2")
    call("edit_file", path="src/main.py", old="return 2", new="return 3")
    call("write_file", path="new/a.txt", content="hi")
    assert context.journal is not None
    assert context.journal.take_back(["another"]) == []
    taken = context.journal.take_back(["call"])
    assert [(item.path, item.problem) for item in taken] == [("new/a.txt", None), ("src/main.py", None)]
    assert (project / "src/main.py").read_bytes() == before
    assert not (project / "new").exists()
    assert context.journal.take_back(["call"]) == []


def test_what_a_person_changed_since_is_left_alone(call: Any, context: ToolContext, project: Path) -> None:
    call("edit_file", path="src/main.py", old="return 1", new="return 2")
    call("write_file", path="a.txt", content="hi")
    (project / "src/main.py").write_text("mine\n")
    assert context.journal is not None
    problems = {item.path: item.problem for item in context.journal.take_back(["call"])}
    assert problems == {"a.txt": None, "src/main.py": "it was changed since, so it is left as it is"}
    assert (project / "src/main.py").read_text() == "mine\n"
    assert not (project / "a.txt").exists()


def test_kept_copies_are_their_owners_alone(call: Any, context: ToolContext) -> None:
    call("write_file", path="a.txt", content="hi")
    assert context.journal is not None
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (context.journal.folder, *context.journal.folder.iterdir())]
    assert modes == [0o700, 0o600]


def test_a_change_whose_copy_cannot_be_kept_is_not_made(project: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("in the way")
    context = ToolContext(root=Root(project), journal=Journal(tmp_path / "kept"))
    result = Registry.built_in().call("write_file", '{"path": "a.txt", "content": "hi"}', context)
    assert result.status == "error"
    assert result.text.startswith("the file was not changed, because no copy of it could be kept")
    assert not (project / "a.txt").exists()


# Searching


@pytest.fixture(params=["ripgrep", "ours"])
def search(request: pytest.FixtureRequest, project: Path, tmp_path: Path) -> Any:
    import shutil

    environment = dict(os.environ)
    if request.param == "ours":
        environment["PATH"] = str(tmp_path / "nothing")
    elif not shutil.which("rg"):
        pytest.skip("ripgrep is not installed")
    registry = Registry.built_in()
    context = ToolContext(root=Root(project), timeout_seconds=20, environment=environment)
    return lambda **arguments: registry.call("search", json.dumps(arguments), context)


def test_a_search_gives_path_number_and_line(search: Any, project: Path) -> None:
    (project / "b.txt").write_text("none\nreturn of the é\n")
    (project / ".git").mkdir()
    (project / ".git/x").write_text("return")
    (project / "c.bin").write_bytes(b"\0return\n")
    assert search(pattern="return").text.splitlines() == ["b.txt:2:return of the é", "src/main.py:5:    return 1"]
    assert search(pattern="ret.rn", path="src").text == "src/main.py:5:    return 1"
    assert search(pattern="return", path="b.txt").text == "b.txt:2:return of the é"
    assert search(pattern="return", files="*.py").text == "src/main.py:5:    return 1"
    assert search(pattern="nowhere").text == "nothing in . matches nowhere"
    assert search(pattern="-x").text == "nothing in . matches -x"


def test_a_wrong_pattern_and_a_flood_of_matches_are_said(search: Any, project: Path) -> None:
    assert "is not a regular expression" in search(pattern="(").text
    assert "there is no file nowhere" in search(pattern="a", path="nowhere").text
    (project / "many.txt").write_text("match " * 200 + "\n" + "match\n" * 1000)
    text = search(pattern="match").text
    assert text.endswith("[more than 200 lines match; narrow it down]")
    assert len(text.splitlines()[0]) < 600


def test_a_search_does_not_follow_links(search: Any, project: Path) -> None:
    (project / "out").symlink_to("..")
    (project / "file").symlink_to("../secret.txt")
    assert search(pattern="secret").text == "nothing in . matches secret"


@pytest.mark.usefixtures("very_deep")
def test_a_search_of_very_deep_folders_ends_and_finds_what_is_not_too_deep(search: Any) -> None:
    found = search(pattern="needle")
    assert found.status == "ok"
    assert found.text.splitlines()[0] == f"{'d/' * 90}needle.txt:1:a needle"
    assert "Traceback" not in found.text


def test_an_expression_that_takes_for_ever_ends_with_its_time(project: Path, tmp_path: Path) -> None:
    (project / "a.txt").write_text("a" * 40 + "b\n")
    context = ToolContext(root=Root(project), timeout_seconds=0.5, environment={"PATH": str(tmp_path)})
    result = Registry.built_in().call("search", '{"pattern": "(a+)+$"}', context)
    assert result == ToolResult("timeout", "the search took longer than 0.5 s; narrow it down")
