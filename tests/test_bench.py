"""What `bench speed` says: kernels that find the limits, the least work of a step, shares, pairs and spreads.

How fast anything is is never tested.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_calls import TARGETS, kernels
from tiny_models import write_tiny_model

from engine.errors import UsageError
from engine.gguf_file import open_gguf
from engine.kernels.probe import CHAINS, READ_BYTES, probe_module
from engine.quant import TensorType
from goinfer_chat.bench.machine import PASSES, Peaks, Probe, describe, peak_resident_bytes
from goinfer_chat.bench.report import Summary, table
from goinfer_chat.bench.speed import Bench, Plan, Row
from goinfer_chat.bench.stepper import Stepper
from goinfer_chat.bench.work import Products, Work


# ---------------------------------------------------------------- the kernels that find the limits
def call_probe(target: str, function: str, *args: int | np.ndarray) -> int:
    """Call a kernel of the probe module; returns its number of chains."""
    chosen = kernels(target)
    chosen._call("probe", lambda: probe_module(chosen.target), function, args)
    return CHAINS[chosen.target.dot]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_reads", [0, 1, 2, 7])
def test_a_stream_is_read_to_its_last_byte(target: str, num_reads: int) -> None:
    rng = np.random.default_rng(num_reads)
    stream = rng.integers(-(2**31), 2**31, num_reads * READ_BYTES // 4, dtype=np.int32)
    total = np.full(16, 99, np.int32)
    call_probe(target, "read_stream", stream, stream.nbytes, total)
    expected = stream.reshape(-1, 16).sum(axis=0, dtype=np.int64)
    assert total.tolist() == expected.astype(np.uint64).astype(np.uint32).view(np.int32).tolist()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_product_of_bytes_is_made(target: str, count: int) -> None:
    rng = np.random.default_rng(count)
    chains = CHAINS[kernels(target).target.dot]
    weights = rng.integers(0, 128, 64, dtype=np.uint8)
    activations = rng.integers(-128, 128, (chains, 64), dtype=np.int8)
    sums = np.full((chains, 16), 7, np.int32)
    call_probe(target, "dot_products", weights, activations, count, sums)
    rounds = sum((weights ^ (n % 2)).astype(np.int32) for n in range(count))
    expected = 7 + (activations.astype(np.int32) * rounds).reshape(chains, 16, 4).sum(axis=2)
    assert sums.tolist() == expected.tolist()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [0, 1, 6])
def test_every_product_of_floats_is_made(target: str, count: int) -> None:
    rng = np.random.default_rng(count)
    chains = CHAINS[kernels(target).target.dot]
    x = rng.integers(-9, 9, 16).astype(np.float32)
    y = rng.integers(-9, 9, (chains, 16)).astype(np.float32)
    sums = np.full((chains, 16), 0.5, np.float32)
    call_probe(target, "float_products", x, y, count, sums)
    assert sums.tolist() == (0.5 + count * x * y).tolist()


# ---------------------------------------------------------------- the limits
@pytest.fixture
def probe() -> Iterator[Probe]:
    probe = Probe(3, 1 << 20)
    yield probe
    probe.close()


def test_bandwidth_is_the_buffer_over_the_time_of_the_best_pass(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([4.0, 3.0, 2.0, 5.0] + [9.0] * PASSES)
    monkeypatch.setattr(probe, "_seconds", lambda work: next(times))
    assert probe.bandwidth() == probe._buffer.nbytes / 2


def test_peaks_count_the_products_of_all_threads(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5] * PASSES + [2.0] * PASSES)
    monkeypatch.setattr(probe, "_seconds", lambda work: next(times))
    peaks = probe.peaks(rounds=10)
    instructions = 3 * 10 * probe._chains
    assert (peaks.integer, peaks.floating) == (64 * instructions / 0.5, 16 * instructions / 2.0)


def test_each_thread_reads_its_own_part_of_a_buffer_that_is_written(probe: Probe) -> None:
    probe._buffer[:] = np.arange(len(probe._buffer)) % 251
    assert probe.bandwidth() > 0
    parts = probe._buffer.view(np.int32).reshape(3, -1, 16)
    assert probe._read_sums.tolist() == parts.sum(axis=1, dtype=np.int64).astype(np.int32).tolist()


def test_a_pass_lasts_from_the_first_start_to_the_last_end(probe: Probe) -> None:
    done: list[int] = []
    assert 0 < probe._seconds(done.append) < 60
    assert sorted(done) == [0, 1, 2]


def test_products_of_both_kinds_take_their_times_one_after_the_other() -> None:
    assert Peaks(integer=100.0, floating=20.0).seconds(50, 30) == 2.0


def test_a_machine_is_described_by_what_stands_in_every_table() -> None:
    machine = describe()
    assert machine.cpu
    assert machine.kernels in machine.lines(1)[1]
    assert machine.lines(1)[1].endswith("1 thread")
    assert (peak_resident_bytes() or 10**9) > 10**7


# ---------------------------------------------------------------- the least work
def tensor_elements(path: Path) -> dict[str, tuple[int, int]]:
    """Name -> (elements, bytes) of each matrix."""
    with open_gguf(path) as gguf:
        return {n: (int(np.prod(t.shape)), t.nbytes) for n, t in gguf.tensors.items() if len(t.shape) == 2}


def work_of(path: Path) -> Work:
    with open_gguf(path) as gguf:
        return Work.of(gguf)


def test_a_token_needs_every_weight_once(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", num_layers=3)
    matrices, work = tensor_elements(path), work_of(path)
    assert work.weight_bytes == sum(size for _, size in matrices.values())
    assert work.matrices(1, 1) == Products(integer=sum(count for count, _ in matrices.values()))


def test_a_table_that_is_only_looked_up_is_not_read(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tied=False)
    matrices, work = tensor_elements(path), work_of(path)
    looked_up = matrices.pop("token_embd.weight")
    assert looked_up == matrices["output.weight"]
    assert work.weight_bytes == sum(size for _, size in matrices.values())
    assert work.matrices(1, 1).integer == sum(count for count, _ in matrices.values())


def test_rows_without_logits_stop_at_the_last_layers_keys_and_values(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", num_layers=2)
    matrices, work = tensor_elements(path), work_of(path)
    only_wanted = ["token_embd", *(f"blk.1.{name}" for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down"))]
    skipped = sum(matrices[f"{name}.weight"][0] for name in only_wanted)
    everything = sum(count for count, _ in matrices.values())
    assert work.matrices(5, 0).integer == 5 * (everything - skipped)
    assert work.matrices(5, 2).integer == 5 * (everything - skipped) + 2 * skipped


def test_rows_without_logits_stop_before_layers_that_look_at_keys_of_others(tmp_path: Path) -> None:
    """Three of five layers; and a table with an embedding for each layer is only looked up."""
    path = write_tiny_model(tmp_path / "m.gguf", "gemma4", num_layers=5)
    matrices, work = tensor_elements(path), work_of(path)
    matrices.pop("per_layer_token_embd.weight")
    last = [f"blk.1.{name}.weight" for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down", "inp_gate", "proj")]
    behind = [name for name in matrices if name.startswith(("blk.2.", "blk.3.", "blk.4."))]
    skipped = sum(matrices[name][0] for name in ("token_embd.weight", *last, *behind))
    everything = sum(count for count, _ in matrices.values())
    assert work.weight_bytes == sum(size for _, size in matrices.values())
    assert work.matrices(5, 2).integer == 5 * (everything - skipped) + 2 * skipped
    # A row reads keys and values in every layer: two that see everything, with two heads of 64, and three of 32.
    assert work.kv_bytes(20) == 20 * 2 * 2 * (2 * 2 * 64 + 3 * 2 * 32)
    assert work.prompt_attention(20).integer == 2 * 2 * 4 * ((32 * 20 * 21 // 2) + 20 * (64 + 32 + 64 + 32))


def test_weights_that_are_floats_need_float_products(tmp_path: Path) -> None:
    types = {"blk.*.ffn_*": TensorType.F16}
    path = write_tiny_model(tmp_path / "m.gguf", num_layers=1, tensor_types=types)
    products = work_of(path).matrices(1, 1)
    matrices = tensor_elements(path)
    assert products.floating == sum(count for name, (count, _) in matrices.items() if ".ffn_" in name)
    assert products.plus(Products(1, 1)).integer == 1 + sum(
        count for name, (count, _) in matrices.items() if ".ffn_" not in name
    )


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_attention_counts_what_each_layer_of_each_row_sees(tmp_path: Path, num_tokens: int) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "gemma3", num_layers=8, sliding_window=32)
    work = work_of(path)
    config = work.config
    seen = 0
    for layer in range(8):
        for position in range(num_tokens):
            if layer == 7 and position < num_tokens - 1:
                continue  # only the row whose logits are wanted goes on behind the last layer's K and V
            first = max(0, position + 1 - 32) if config.is_local(layer) else 0
            seen += position + 1 - first
    assert work.prompt_attention(num_tokens) == Products(integer=2 * 2 * 4 * 64 * seen)  # of 16 bits, which count twice
    local = sum(config.is_local(layer) for layer in range(8))
    assert 0 < local < 8
    positions = (8 - local) * num_tokens + local * min(num_tokens, 32)
    assert work.kv_bytes(num_tokens) == positions * 2 * 2 * 64 * 2  # keys and values, 2 heads of 64 values, 2 bytes


# ---------------------------------------------------------------- figures
def test_a_summary_has_the_middle_and_the_ends() -> None:
    summary = Summary((3.0, 1.0, 10.0, 2.0))
    assert (summary.median, summary.low, summary.high) == (2.5, 1.0, 10.0)
    assert summary.as_object() == {"median": 2.5, "low": 1.0, "high": 10.0, "values": [3.0, 1.0, 10.0, 2.0]}
    assert (summary.text(), Summary((1234.56,)).text(1, " ms")) == ("2.5 (1.0-10.0)", "1,234.6 ms")
    assert Summary((0.5, 0.25)).percent() == "38 % (25-50)"


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    # The machine halves its speed in the middle: each pair says 2, and so must the median.
    ours, theirs = Summary((40.0, 20.0, 20.0)), Summary((20.0, 10.0, 10.0))
    assert ours.over(theirs).values == (2.0, 2.0, 2.0)
    ours, theirs = Summary((10.0, 40.0, 30.0)), Summary((5.0, 10.0, 30.0))
    assert ours.over(theirs).median == 2.0
    assert ours.median / theirs.median == 3.0


def test_a_table_leaves_out_columns_without_figures() -> None:
    assert table(["", "tok/s", "peer", "ratio"], [["prefill 5", "1.5", "", "2"], ["x", "10.25", "", ""]]) == [
        "           tok/s  ratio",
        "prefill 5    1.5      2",
        "x          10.25",
    ]


# ---------------------------------------------------------------- what is measured
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"repeat": 0}, "must be 1 or more"),
        ({"prefill": (5, 0)}, "must be 1 or more"),
        ({"depths": (-1,)}, "must be 1 or more"),
        ({"rows": (1,)}, "rows of a step must be 2 to 64"),
        ({"rows": (65,)}, "rows of a step must be 2 to 64"),
        ({"prefill": (), "depths": ()}, "nothing to measure"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(**numbers)


def test_a_plan_has_room_for_its_longest_case() -> None:
    assert Plan(prefill=(5, 3), depths=(2, 1), tokens=2, rows=()).num_positions == 5
    assert Plan(prefill=(), depths=(7,), tokens=2, rows=(8,)).num_positions == 15
    assert Plan(prefill=(), depths=(7,), tokens=9, rows=(8,)).num_positions == 16


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny.gguf", num_layers=2)


@pytest.fixture
def stepper(tiny_model: Path) -> Iterator[Stepper]:
    stepper = Stepper(tiny_model, threads=1, num_positions=100, progress=lambda text, share: None)
    yield stepper
    stepper.close()


def recorded(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], int]]:
    """(ids, positions, number of wanted rows) of each step from now on."""
    steps: list[tuple[list[int], list[int], int]] = []
    forward = stepper.model.forward

    def record(batch: Any) -> Any:
        steps.append((batch.ids.tolist(), batch.positions.tolist(), len(batch.want)))
        return forward(batch)

    monkeypatch.setattr(stepper.model, "forward", record)
    return steps


def test_a_prompt_is_read_once_from_an_empty_cache(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, ids = recorded(stepper, monkeypatch), stepper.ids(70)
    for _ in range(2):
        steps.clear()
        assert stepper.prompt(ids) > 0
        assert [token for part, _, _ in steps for token in part] == ids
        assert [position for _, part, _ in steps for position in part] == list(range(70))
        assert [wanted for *_, wanted in steps] == [0] * (len(steps) - 1) + [1]


def test_decoding_runs_one_token_a_step_behind_what_is_cached(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ids = stepper.ids(40), [9, 8, 7]
    stepper.decode(before, ids)
    steps = recorded(stepper, monkeypatch)
    assert stepper.decode(before, ids) > 0
    # The second time `before` is there already, and what was decoded behind it is gone.
    assert steps == [([9], [40], 1), ([8], [41], 1), ([7], [42], 1)]
    stepper.decode(before[:20], ids[:1])
    assert steps[3:] == [([9], [20], 1)]


def test_steps_of_several_rows_stay_at_their_depth(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    before, ids = stepper.ids(30), [1, 2, 3]
    stepper.rows(before, ids, 1)
    steps = recorded(stepper, monkeypatch)
    assert stepper.rows(before, ids, 2) > 0
    assert steps == [([1, 2, 3], [30, 31, 32], 3)] * 2


def test_the_tokens_are_those_that_other_programs_were_given(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(stepper.ids(500)) < stepper.config.vocab_size
    monkeypatch.setattr(stepper, "config", type("Config", (), {"vocab_size": 151_936}))
    assert stepper.ids(3) == [513, 8432, 16351]
    assert all(500 <= token < 151_436 for token in stepper.ids(1000))


def test_more_tokens_than_the_model_was_trained_for_are_refused(tiny_model: Path) -> None:
    with pytest.raises(
        UsageError, match=r"2,049 tokens are asked for: the context is 2,048 tokens, the most tiny\.gguf"
    ):
        Stepper(tiny_model, threads=1, num_positions=2049, progress=lambda text, share: None)


class Scripted:
    """Stands for an engine or a peer: takes as long as it is told."""

    def __init__(self, log: list[str], name: str, seconds: list[float]) -> None:
        self._log, self._name, self._seconds = log, name, iter(seconds)

    def prompt(self, ids: list[int]) -> float:
        self._log.append(f"{self._name} {len(ids)}")
        return next(self._seconds)

    def decode(self, before: list[int], ids: list[int]) -> float:
        self._log.append(f"{self._name} {len(before)}+{len(ids)}")
        return next(self._seconds)


def scripted_bench(
    stepper: Stepper, ours: list[float], peers: list[float], *, plan: Plan, bandwidths: list[float]
) -> tuple[Bench, list[str]]:
    log: list[str] = []
    engine = Scripted(log, "ours", ours)
    engine.work, engine.ids = stepper.work, stepper.ids  # type: ignore[attr-defined]
    rates = iter(bandwidths)

    class Limits:
        def bandwidth(self) -> float:
            log.append("bandwidth")
            return next(rates)

        def peaks(self) -> Peaks:
            log.append("peaks")
            return Peaks(integer=1e9, floating=1e8)

    peer = Scripted(log, "peer", peers) if peers else None
    return Bench(engine, Limits(), peer, plan), log  # type: ignore[arg-type]


def test_limit_ours_and_the_peer_take_turns(stepper: Stepper) -> None:
    plan = Plan(prefill=(), depths=(10,), tokens=4, repeat=3)
    bench, log = scripted_bench(stepper, [2.0, 1.0, 4.0], [4.0, 4.0, 4.0], plan=plan, bandwidths=[1e6, 2e6, 5e5])
    row = bench.measure("decode", 10, 1, lambda what: None)
    assert log == ["bandwidth", "ours 10+4", "peer 10+4"] * 3
    assert row.rate == Summary((2.0, 4.0, 1.0))
    assert row.peer == Summary((1.0, 1.0, 1.0))
    assert row.ratio == Summary((2.0, 4.0, 1.0))
    # Each time, half of what the memory gave at that moment would have done.
    per_token = stepper.work.weight_bytes / 1e6
    assert row.share is not None
    assert row.share.values == pytest.approx([2 * per_token] * 3)
    assert row.share_with_attention is not None
    both = (stepper.work.weight_bytes + stepper.work.kv_bytes(10)) / 1e6
    assert row.share_with_attention.values == pytest.approx([2 * both] * 3)


def test_prefill_stands_beside_the_products_it_needs(stepper: Stepper) -> None:
    plan = Plan(prefill=(50,), depths=(), repeat=1)
    bench, log = scripted_bench(stepper, [0.25], [], plan=plan, bandwidths=[])
    row = bench.measure("prefill", 50, 1, lambda what: None)
    assert log == ["peaks", "ours 50"]
    assert (row.rate, row.limit, row.ratio) == (Summary((200.0,)), Summary((1e9,)), None)
    matrices, attention = stepper.work.matrices(50, 1), stepper.work.prompt_attention(50)
    assert row.share is not None
    assert row.share.median == pytest.approx(matrices.integer / 1e9 / 0.25)
    assert row.share_with_attention is not None
    assert row.share_with_attention.median == pytest.approx((matrices.integer + attention.integer) / 1e9 / 0.25)


def test_a_further_row_costs_what_it_adds_to_a_step_of_one(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "rows", lambda before, ids, count: {1: 2.0, 5: 3.0}[len(ids)])
    bench = Bench(stepper, None, None, Plan(depths=(9,), rows=(5,), repeat=2))  # type: ignore[arg-type]
    row = bench.measure("rows", 9, 5, lambda what: None)
    assert row == Row(kind="rows", tokens=9, width=5, extra_row=Summary((0.125, 0.125)))


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goinfer_chat", "bench", *arguments, "--threads", "1", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True)


def test_speed_prints_figures_that_agree_with_each_other(tiny_model: Path) -> None:
    plan = ["--prefill", "5,70", "--depth", "3", "--rows", "2", "--tokens", "2", "--repeat", "2"]
    done = bench("speed", "--model", str(tiny_model), *plan, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["model"], result["threads"], result["peer"]) == ("Tiny llama", 1, None)
    assert result["machine"]["kernels"] == describe().kernels
    rows = result["rows"]
    assert [(row["measure"], row["tokens"], row["rows"]) for row in rows] == [
        ("prefill", 5, 1),
        ("prefill", 70, 1),
        ("decode", 3, 1),
        ("rows", 3, 2),
    ]
    for row in rows[:3]:
        assert len(row["tok_s"]["values"]) == len(row["limit"]["values"]) == 2
        assert row["share_with_attention"]["low"] > row["share_of_limit"]["low"] > 0
    decode = rows[2]
    for rate, limit, share in zip(*(decode[name]["values"] for name in ("tok_s", "limit", "share_of_limit"))):
        assert share == pytest.approx(result["weight_bytes"] * rate / limit, rel=1e-4)
    assert len(rows[3]["extra_row_cost"]["values"]) == 2


def test_speed_of_the_default_model_is_a_table(model_path: Callable[[str], Path]) -> None:
    plan = ["--prefill", "9", "--depth", "8", "--tokens", "2", "--repeat", "1"]
    done = bench("speed", "--model", str(model_path("smollm2-135m")), *plan)
    assert (done.returncode, done.stderr) == (0, "")
    head, machine, kernels_line, blank, columns, prefill, decode = done.stdout.splitlines()
    assert head.endswith("MB of weights a step")
    assert [machine, kernels_line, blank] == [*describe().lines(1), ""]
    assert columns.split() == ["tok/s", "limit", "of", "it", "with", "attention"]
    assert prefill.startswith("prefill 9 ")
    assert decode.startswith("decode at 8 ")
    assert (prefill.count("%"), "GMAC/s" in prefill, "GB/s" in decode) == (2, True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--prefill", "5,x"], "error: 'x' is not a whole number"),
        (["speed", "--peer", "other"], "error: unknown peer 'other'; choose from: llama.cpp, openvino"),
        (
            ["replay", "--peer", "openvino"],
            "error: openvino is measured by bench speed only; bench replay takes: llama.cpp",
        ),
        (["speed", "--peer-python", "python"], "error: --peer-python says where a peer is; give --peer too"),
        (["replay", "--repeat", "0"], "error: repeat must be 1 or more, not 0"),
        (["copy", "--spec", "guess"], "error: unknown speculation 'guess'; choose from: off, ngram"),
        (["chat", "--temperature", "1"], "error: No such option: --temperature"),
    ],
)
def test_a_bench_that_cannot_be_made_says_why(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
