"""The documentation names what there is: files, flags, pages, headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import write_help

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What a link may point to behind `#`, as code hosts make it of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in LINK.findall(text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {link for link in LINK.findall(index.read_text("utf-8")) if "/" not in link}
    assert linked == {path.name for path in (ROOT / "docs").iterdir() if path.is_file()} - {"README.md"}


def test_the_page_of_help_texts_is_what_the_program_says() -> None:
    assert write_help.PAGE.read_text("utf-8") == write_help.page(), "python tests/write_help.py makes it anew"


def test_the_tree_of_the_readme_names_what_there_is() -> None:
    """Every file it names exists in the folder it stands under, and every folder of modules is in it."""
    text = (ROOT / "README.md").read_text("utf-8")
    tree = re.search(r"## Files\n\n((?:    .*\n)+)", text)
    assert tree is not None
    folders: dict[int, Path] = {0: ROOT}
    named: set[Path] = set()
    base = ROOT
    for line in tree[1].splitlines():
        indent = len(line) - len(line.lstrip())
        if indent <= 16:  # not the second line of a long text
            base = folders[max(depth for depth in folders if 4 + 2 * depth <= indent)]
            if folder := re.match(r"\s+([\w/.]+)/\s", line):
                depth = (indent - 4) // 2
                folders = {d: path for d, path in folders.items() if d <= depth}
                folders[depth + 1] = base / folder[1]
                named.add(base / folder[1])
                base = folders[depth + 1]
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert (base / name).is_file(), f"{name} in: {line.strip()}"
            named.add(base / name)
    modules = [path for folder in ("engine", "tools", "goinfer_chat") for path in (ROOT / folder).rglob("*.py")]
    # A folder without lines of its own is told of as a whole, and a private or an empty module by nothing.
    explained = {path.parent for path in named if path.suffix == ".py"}
    missing = [
        str(path.relative_to(ROOT))
        for path in modules
        if path.parent in explained and path not in named and not path.name.startswith("__")
    ]
    assert missing == []
    assert all({path.parent, path.parent.parent} & (named | explained) for path in modules)


def test_every_flag_is_explained() -> None:
    flag = re.compile(r"(?<![\w-])--(?!no-)[a-z][a-z-]+")
    guides = " ".join(page.read_text("utf-8") for page in PAGES if page != write_help.PAGE)
    missing = set(flag.findall(write_help.page())) - set(flag.findall(guides))
    assert missing <= {"--version"}
