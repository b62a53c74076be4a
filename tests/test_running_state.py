"""Running states of conversations: checkpoints are where they are needed, few enough, and right.

Whatever is done to a table, going on gives the bits of a conversation that was evaluated whole, from its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import Runner, running, tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kernel_calls import assert_same_bits
from tiny_models import write_tiny_model

from engine import running_state
from engine.backend import open_backend
from engine.gguf_file import open_gguf
from engine.kv_cache import BlockTable, KVPool, StatePool, StatesFullError
from engine.kv_file import KVFile
from engine.kv_layout import Identity
from engine.model import LoadOptions
from engine.running_state import RunningState

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "ffn_size": 32,
    "num_layers": 3,
    "delta": (1, 2, 32),
}


def pool_of(num_slots: int = 8, most_checkpoints: int = 4) -> KVPool:
    pool = KVPool(64, 64)
    pool.states = StatePool(16, num_slots, most_checkpoints)
    return pool


def run(table: BlockTable, count: int, num_guessed: int = 0, num_right: int = 0) -> None:
    """A step of `count` rows, of whose guesses the first `num_right` were right."""
    table.reserve(count, num_guessed)
    table.append(range(count - num_guessed))
    if num_guessed:
        table.append(range(num_right))
        table.truncate(len(table))


def lengths(table: BlockTable) -> list[int]:
    assert table.state is not None
    return [c.length for c in table.state.checkpoints]


def num_used(pool: KVPool) -> int:
    assert pool.states is not None
    return pool.states.num_blocks - pool.states.num_free


# ---------------------------------------------------------------- where checkpoints are
def test_states_are_kept_where_messages_end_and_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_state, "INTERVAL", 100)
    pool = pool_of(12, 8)
    table = BlockTable(pool)
    table.mark([30, 90, 149])
    run(table, 70)
    assert lengths(table) == [30]
    run(table, 80)
    assert lengths(table) == [30, 90, 149]
    for _ in range(150):  # decoding
        run(table, 1)
    assert lengths(table) == [30, 90, 149, 249]
    table.rest()
    assert lengths(table) == [30, 90, 149, 249, 300]
    assert num_used(pool) == 5
    table.release()
    assert num_used(pool) == 0


def test_the_longer_ago_the_fewer_states_are_kept() -> None:
    pool = pool_of(12, 6)
    table = BlockTable(pool)
    for _ in range(60):
        run(table, 10)
        table.rest()
    kept = lengths(table)
    assert len(kept) == 6
    assert kept[-1] == 600
    distances = [600 - length for length in kept[:-1]]
    assert distances[-1] <= 20
    assert all(earlier >= 1.4 * later for earlier, later in pairwise(distances))


def test_a_table_is_cut_back_to_the_last_state_before() -> None:
    pool = pool_of()
    table = BlockTable(pool)
    for _ in range(3):
        run(table, 10)
        table.rest()
    fork = table.fork(25)
    assert (len(fork), fork.num_known, lengths(fork)) == (20, 25, [10, 20])
    assert num_used(pool) == 3  # shared
    table.truncate(19)
    assert (len(table), table.num_known, lengths(table)) == (10, 19, [10])
    table.truncate(9)
    assert (len(table), lengths(table)) == (0, [])
    assert num_used(pool) == 2
    fork.release()
    assert num_used(pool) == 0


def test_a_wrong_guess_goes_back_to_before_the_guesses_and_right_ones_stay() -> None:
    pool = pool_of()
    table = BlockTable(pool)
    run(table, 10)
    run(table, 5, num_guessed=4, num_right=4)
    assert len(table) == 15
    run(table, 5, num_guessed=4, num_right=2)
    assert len(table) == 16
    run(table, 7, num_guessed=4, num_right=0)
    assert len(table) == 19
    assert num_used(pool) == 1
    table.rest()
    assert lengths(table) == [19]


def test_a_step_that_did_not_end_costs_what_no_state_was_kept_of() -> None:
    """An interrupt between the step and its end: nobody knows whether the state has taken in its rows."""
    pool = pool_of()
    table = BlockTable(pool)
    run(table, 10)
    table.rest()
    run(table, 1)
    table.reserve(1)
    table.truncate(len(table))
    assert len(table) == 10
    table.reserve(3, 2)
    table.append([1])
    table.rest()  # the row that was no guess is there, and the state before the guesses
    assert lengths(table) == [10, 11]
    table.reserve(3, 2)
    table.rest()
    assert lengths(table) == [10, 11]
    assert num_used(pool) == 2


def test_without_a_free_slot_checkpoints_give_way_and_then_it_is_said() -> None:
    pool = pool_of(4, 4)
    table, other = BlockTable(pool), BlockTable(pool)
    for _ in range(3):
        run(table, 10)
        table.rest()
    run(table, 1)
    assert num_used(pool) == 4
    with pytest.raises(StatesFullError, match="1 more are needed and 0 are free"):
        other.reserve(1)
    assert len(other.blocks) == 0
    run(table, 3, num_guessed=2, num_right=0)
    assert len(table) == 32
    assert lengths(table) == [20, 30]  # or 10: one of the two that are missed least
    table.release()
    run(other, 1)
    assert num_used(pool) == 1


# ---------------------------------------------------------------- what is in them
@pytest.fixture(scope="module", params=["cpu", "torch"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen35", **SIZES)
    if request.param == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'goinfer-chat[torch]'")
        with open_gguf(path) as gguf:
            place = open_backend("torch", "cpu", gguf, "f16")
            model: Any = place.load(gguf, LoadOptions(threads=1, max_positions=512))
            yield Runner(model, model.new_pool(400, 24, 6))
            model.close()
        return
    with running(path, threads=2, blocks=400, positions=512) as opened:
        yield opened


class Conversations(RuleBasedStateMachine):
    """Anything that may happen to conversations, and one table that is evaluated whole for each look at one."""

    runner: Runner
    folder: Path
    seen: dict[tuple[int, ...], np.ndarray]

    @initialize()
    def begin(self) -> None:
        self.tables = [self.runner.table()]

    def _extend(self, table: BlockTable, count: int, seed: int, num_guessed: int = 0, num_right: int = 0) -> None:
        ids = [int(i) for i in tokens(count, 60, seed)]
        table.reserve(count, num_guessed)
        logits = self.runner.forward((table, ids), want=range(max(0, count - 8), count))
        table.append(ids[: count - num_guessed])
        if num_guessed:
            table.append(ids[count - num_guessed : count - num_guessed + num_right])
        said = [*table.ids]
        if num_guessed:
            table.truncate(len(table))
            assert len(table) == len(said) - (num_right if num_right < num_guessed else 0)
        assert_same_bits(logits[len(logits) - num_guessed + num_right - 1], self._whole(said))

    def _whole(self, ids: list[int]) -> np.ndarray:
        key = tuple(ids)
        if key not in self.seen:
            table = self.runner.table()
            self.seen[key] = self.runner.feed(table, ids, 512)[-1]
            table.release()
        return self.seen[key]

    pick = st.integers(0, 3)

    @precondition(lambda self: sum(map(len, self.tables)) < 900)
    @rule(n=pick, count=st.integers(1, 70), seed=st.integers(0, 5), data=st.data())
    def extend(self, n: int, count: int, seed: int, data: st.DataObject) -> None:
        table = self.tables[n % len(self.tables)]
        if len(table) + count > 500:
            return
        table.mark([len(table) + data.draw(st.integers(1, count)), len(table) + count])
        self._extend(table, count, seed)

    @rule(n=pick, known=st.integers(1, 3), guessed=st.integers(1, 5), seed=st.integers(0, 5), data=st.data())
    def guess(self, n: int, known: int, guessed: int, seed: int, data: st.DataObject) -> None:
        table = self.tables[n % len(self.tables)]
        if len(table) + known + guessed > 500:
            return
        self._extend(table, known + guessed, seed, guessed, data.draw(st.integers(0, guessed)))

    @rule(n=pick, share=st.floats(0, 1))
    def truncate(self, n: int, share: float) -> None:
        table = self.tables[n % len(self.tables)]
        table.truncate(int(share * len(table)))

    @precondition(lambda self: len(self.tables) < 4)
    @rule(n=pick, share=st.floats(0, 1))
    def fork(self, n: int, share: float) -> None:
        table = self.tables[n % len(self.tables)]
        table.rest()
        self.tables.append(table.fork(int(share * len(table))))

    @rule(n=pick)
    def rest(self, n: int) -> None:
        self.tables[n % len(self.tables)].rest()

    @rule(n=pick)
    def restart(self, n: int) -> None:
        """Saved, and brought back by another process."""
        n %= len(self.tables)
        table, twin = self.tables[n], self.runner.table()
        table.rest()
        for path in self.folder.iterdir():
            path.unlink()
        identity = Identity.of(self.runner.model.config, "00" * 32)
        path = self.folder / "a.giw-kv"
        with KVFile.open(path, identity) as file:
            file.save(table, self.runner.pool)
        with KVFile.open(path, identity) as file:
            file.restore(twin, self.runner.pool, len(file.ids))
            assert twin.ids == table.ids
        table.release()
        self.tables[n] = twin

    @precondition(lambda self: len(self.tables) > 1)
    @rule(n=pick)
    def release(self, n: int) -> None:
        self.tables.pop(n % len(self.tables)).release()

    @invariant()
    def slots_are_those_of_checkpoints_and_running_states(self) -> None:
        states = self.runner.pool.states
        assert states is not None
        held = set()
        for table in getattr(self, "tables", []):
            assert table.state is not None
            assert len(table.state.checkpoints) <= states.most_checkpoints
            assert all(0 < c.length <= len(table) for c in table.state.checkpoints)
            held |= {c.slot for c in table.state.checkpoints} | {table.state._slot}
        assert states.num_blocks - states.num_free == len(held - {None})

    def teardown(self) -> None:
        for table in self.tables:
            table.release()


def test_going_on_from_a_kept_state_has_the_bits_of_a_prefill(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(running_state, "INTERVAL", 48)

    class Machine(Conversations):
        pass

    Machine.runner, Machine.folder, Machine.seen = runner, tmp_path, {}
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_state_that_nobody_shares_is_given_up_before_one_that_is_shared() -> None:
    pool = StatePool(16, 4, 4)
    one, other = RunningState(pool), RunningState(pool)
    for length in (10, 20, 30):
        one.reserve(length - 10, 10, 0)
        one.advance(length)
        one.rest(length)
    assert other.share(one, 10) == 10
    assert one.thin()
    assert [c.length for c in one.checkpoints] == [10, 30]
    assert not one.thin()
