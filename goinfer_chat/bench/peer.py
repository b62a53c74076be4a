"""Runs a peer as asked and times it: started by `peer_process.py` with a Python that has the peer's library.

    python peer.py PEER MODEL.gguf THREADS POSITIONS

It imports the standard library and the peer only, since that Python need not have anything of ours. Requests come as
lines of JSON on standard input, answers go as lines of JSON to standard output:

    {"do": "prompt", "ids": [...], "reuse": bool}      -> {"seconds": s, "tokens": n}   to the logits of the last id
    {"do": "decode", "before": [...], "ids": [...]}    -> {"seconds": s, "tokens": n}   one by one behind `before`
    {"error": "..."} when something cannot be done; the first line is {"version": ..., "system": ...}
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

BATCH = 512


class LlamaCpp:
    """A context of llama.cpp with one sequence, and the ids that are in its cache."""

    def __init__(self, path: str, threads: int, positions: int) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        lib = self._lib
        # Kept: the library calls it for as long as it lives.
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        settings = lib.llama_context_default_params()
        settings.n_ctx = positions + 64
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._cached: list[int] = []

    def about(self) -> dict[str, str]:
        system = self._lib.llama_print_system_info()
        return {"version": str(self._lib.__version__), "system": system.decode("utf-8", "replace").strip()}

    def prompt(self, ids: list[int], reuse: bool) -> dict[str, float]:
        started = perf_counter()
        kept = self._cut_to(min(self._common(ids), len(ids) - 1) if reuse else 0)
        self._run(ids[kept:])
        return {"seconds": perf_counter() - started, "tokens": len(ids) - kept}

    def decode(self, before: list[int], ids: list[int]) -> dict[str, float]:
        self._run(before[self._cut_to(self._common(before)) :])
        started = perf_counter()
        for token in ids:
            self._run([token])
        return {"seconds": perf_counter() - started, "tokens": len(ids)}

    def _common(self, ids: list[int]) -> int:
        pairs = enumerate(zip(self._cached, ids))
        return next((n for n, (mine, theirs) in pairs if mine != theirs), min(len(self._cached), len(ids)))

    def _cut_to(self, length: int) -> int:
        if length < len(self._cached):
            lib = self._lib
            if not lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, length, -1):
                raise RuntimeError("llama.cpp cannot cut this model's cache back")
            del self._cached[length:]
        return length

    def _run(self, ids: list[int]) -> None:
        lib = self._lib
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            array = (lib.llama_token * len(part))(*part)
            if lib.llama_decode(self._context, lib.llama_batch_get_one(array, len(part))) != 0:
                raise RuntimeError("llama.cpp could not run a batch")
        lib.llama_synchronize(self._context)
        self._cached += ids


class OpenVino:
    """A pipeline of OpenVINO GenAI with its own defaults, but that it keeps nothing from one prompt to the next.

    It gives no logits and takes no tokens while it decodes. So a prompt is timed to its first token, and decoding goes
    on greedily with what it says itself, the same number of tokens.
    """

    def __init__(self, path: str, threads: int, positions: int) -> None:
        del positions  # its cache grows
        self._openvino: Any = importlib.import_module("openvino")
        self._lib: Any = importlib.import_module("openvino_genai")
        scheduling = self._lib.SchedulerConfig()
        scheduling.enable_prefix_caching = False
        self._pipe = self._lib.LLMPipeline(path, "CPU", scheduler_config=scheduling, INFERENCE_NUM_THREADS=threads)

    def about(self) -> dict[str, str]:
        core = self._openvino.Core()
        names = ("INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION")
        # A precision prints itself as <Type: 'bfloat16'>.
        values = (str(core.get_property("CPU", name)).removeprefix("<Type: '").removesuffix("'>") for name in names)
        said = " | ".join(f"{name} = {value}" for name, value in zip(names, values))
        return {
            "version": str(self._lib.__version__),
            "system": f"{core.get_property('CPU', 'FULL_DEVICE_NAME')} : {said}",
        }

    def prompt(self, ids: list[int], reuse: bool) -> dict[str, float]:
        if reuse:
            raise RuntimeError("prompts are measured without reuse here")
        started = perf_counter()
        self._run(ids, 1)
        return {"seconds": perf_counter() - started, "tokens": len(ids)}

    def decode(self, before: list[int], ids: list[int]) -> dict[str, float]:
        metrics = self._run(before, 1 + len(ids)).perf_metrics
        steps = list(metrics.raw_metrics.m_durations)  # microseconds, one for each token behind the first
        if len(steps) != len(ids):
            raise RuntimeError(f"OpenVINO decoded {len(steps)} tokens of {len(ids)}")
        return {"seconds": sum(steps) / 1e6, "tokens": len(ids)}

    def _run(self, ids: list[int], count: int) -> Any:
        config = self._lib.GenerationConfig()
        config.max_new_tokens = count
        config.do_sample, config.ignore_eos = False, True
        numpy = importlib.import_module("numpy")  # OpenVINO's arrays are NumPy's
        row = numpy.array([ids], numpy.int64)
        tensor = self._openvino.Tensor
        return self._pipe.generate(self._lib.TokenizedInputs(tensor(row), tensor(numpy.ones_like(row))), config)


PEERS: dict[str, Any] = {"llama.cpp": LlamaCpp, "openvino": OpenVino}


def answers(arguments: list[str], requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The line about the peer, then an answer for each request."""
    name, path, threads, positions = arguments
    peer = PEERS[name](path, int(threads), int(positions))
    yield peer.about()
    for line in requests:
        request = json.loads(line)
        if request["do"] == "prompt":
            yield peer.prompt(request["ids"], request["reuse"])
        else:
            yield peer.decode(request["before"], request["ids"])


def main() -> None:
    try:
        for answer in answers(sys.argv[1:], iter(sys.stdin.readline, "")):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - whoever asked shows it
        sys.stdout.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


if __name__ == "__main__":
    main()
