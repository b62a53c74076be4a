"""Logits of tiny models by llama.cpp, for test_llama_cpp_logits.py: `PEER/bin/python write_llama_cpp_logits.py FOLDER`.

FOLDER has a MODEL.gguf of each case (`test_llama_cpp_logits.py FOLDER` writes them), and gets a MODEL.json. PEER is an
environment with llama-cpp-python; goldens are of 0.3.36. Everything that llama.cpp lets one choose is chosen for
exactness: K and V in f32, no flash attention. Weights are f32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llama_cpp import Llama

TYPE_F32 = 0


def logits(path: Path, case: dict) -> list[list[float]]:
    """[probes][some of the vocabulary] of one pass over the ids."""
    llama = Llama(
        str(path),
        n_ctx=case["context_size"],
        n_batch=512,
        logits_all=True,
        flash_attn=False,
        type_k=TYPE_F32,
        type_v=TYPE_F32,
        n_threads=1,
        verbose=False,
    )
    llama.eval(case["ids"])
    step = case["vocabulary_step"]
    return [[round(float(x), 6) for x in llama.scores[position][::step]] for position in case["probes"]]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for case_path in sorted(folder.glob("*.case")):
        case = json.loads(case_path.read_text())
        found = {"sha256": case["sha256"], "logits": logits(folder / case["file"], case)}
        case_path.with_suffix(".json").write_text(json.dumps(found))
