"""What many tests need: models, what llama.cpp said about them, and a store of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizer_metadata import read_metadata

from engine.errors import ModelError
from goinfer_chat.models import catalogue
from goinfer_chat.settings import Settings
from goinfer_chat.store import Store

if TYPE_CHECKING:
    import anthropic
    import openai
    from http_server import Running


@pytest.fixture(scope="session", autouse=True)
def _no_conversation_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test, and no process that a test starts, sees or changes what a person keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOINFER_CHAT_SESSION_DIR", str(tmp_path_factory.mktemp("sessions") / "of-nobody"))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """`model_path("smollm2-135m")`: the file of a model of the catalogue; the test is skipped where there is none.

    The default model is fetched if it is not in the models folder, the larger ones are not.
    """
    missing: dict[str, str] = {}  # asked once: a network that is down takes its time to say so

    def find(name: str) -> Path:
        if name not in missing:
            try:
                path = catalogue.resolve(name) or (catalogue.pull(name) if name == Settings().model else None)
            except ModelError as error:
                missing[name] = str(error)
            else:
                if path is not None:
                    return path
                missing[name] = f"{name} is not in {catalogue.models_folder()}: goinfer-chat pull {name}"
        pytest.skip(missing[name])

    return find


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """`golden("smollm2-135m")`: token ids, rendered prompts and greedy replies of llama.cpp for that model."""

    def load(name: str) -> dict[str, Any]:
        text = (Path(__file__).parent / "data" / "goldens" / f"{name}.json").read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        return content

    return load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's conversations are kept."""
    return tmp_path / "sessions"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store(folder) as store:
        yield store


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the module's `server`."""
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client of the module's `server`."""
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def metadata_of(model_path: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """What the file of a model says about its tokenizer; each is read once."""
    loaded: dict[str, dict[str, Any]] = {}

    def load(name: str) -> dict[str, Any]:
        if name not in loaded:
            loaded[name] = read_metadata(model_path(name))
        return loaded[name]

    return load
