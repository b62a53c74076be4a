"""The `remote` backend: any server that speaks OpenAI's chat completions, behind the same Engine protocol."""

from engine.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
