"""Who gets whose cache, on tables alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import BLOCK_SIZE, BlockTable, CacheFullError, KVPool, common_start
from engine.sessions import Sessions

SYSTEM = list(range(1000, 1007))  # a short start that the chat template puts on every prompt


def make(num_blocks: int = 64, capacity: int = 4, evicted: list[tuple[str, int]] | None = None) -> Sessions:
    hook = None if evicted is None else lambda name, table: evicted.append((name, len(table)))
    return Sessions(KVPool(BLOCK_SIZE * 8, num_blocks), capacity, hook)


def turn(sessions: Sessions, name: str, prompt: list[int], reply: list[int] | None = None) -> int:
    """One request; returns how many prompt tokens were prefilled."""
    table = sessions.begin(name, prompt)
    reused = len(table)
    assert table.ids == prompt[:reused]
    rest = prompt[reused:] + (reply or [])
    sessions.reserve(table, len(rest))
    table.append(rest)
    sessions.end(name)
    return len(prompt) - reused


def six_turns(num_conversations: int, capacity: int) -> list[list[int]]:
    """Tokens prefilled by each turn of each conversation, the conversations taking turns."""
    sessions = make(num_blocks=256, capacity=capacity)
    histories = {f"c{i}": list(SYSTEM) for i in range(num_conversations)}
    prefilled: dict[str, list[int]] = {name: [] for name in histories}
    for number in range(6):
        for client, (name, history) in enumerate(histories.items()):
            history += [10_000 * client + 100 * number + k for k in range(20 + number)]
            reply = [50_000 + 10_000 * client + 200 * number + k for k in range(100)]
            prefilled[name].append(turn(sessions, name, history, reply))
            history += reply
    return list(prefilled.values())


@pytest.mark.parametrize("num_conversations", [1, 2, 4])
def test_turns_two_to_six_prefill_only_what_is_new_at_one_two_and_four_conversations(num_conversations: int) -> None:
    for prefilled in six_turns(num_conversations, capacity=4):
        assert prefilled[1:] == [21, 22, 23, 24, 25]


def test_two_conversations_taking_turns_never_take_each_other_s_cache() -> None:
    sessions = make()
    a, b = [*SYSTEM, *range(200)], [*SYSTEM, *range(500, 700)]
    assert turn(sessions, "a", a) == len(a)
    assert turn(sessions, "b", b) == len(b) - len(SYSTEM)
    for _ in range(3):
        a, b = [*a, 1, 2, 3], [*b, 4, 5, 6]
        assert turn(sessions, "a", a) == 3
        assert turn(sessions, "b", b) == 3


def test_a_new_conversation_takes_the_shared_start_and_the_owner_keeps_all() -> None:
    sessions = make()
    system = list(range(150))
    turn(sessions, "old", [*system, 900, 901])
    assert turn(sessions, "new", [*system, 800]) == 1
    assert turn(sessions, "old", [*system, 900, 901, 902]) == 1


def test_full_blocks_of_a_shared_start_are_held_once() -> None:
    pool = KVPool(BLOCK_SIZE * 8, 64)
    sessions = Sessions(pool, 4)
    system = list(range(2 * BLOCK_SIZE))
    for k in range(4):
        turn(sessions, f"c{k}", [*system, 900 + k])
    assert pool.num_blocks - pool.num_free == 2 + 4


def test_a_conversation_that_another_knows_better_continues_from_a_fork_of_it() -> None:
    sessions = make()
    turn(sessions, "a", [*SYSTEM, *range(100)])
    turn(sessions, "b", [*SYSTEM, 777])
    assert turn(sessions, "b", [*SYSTEM, *range(90), 5]) == 1
    assert turn(sessions, "a", [*SYSTEM, *range(100), 6]) == 1


def test_what_a_conversation_has_itself_is_never_copied_from_another() -> None:
    pool = KVPool(BLOCK_SIZE * 8, 8)
    sessions = Sessions(pool, 4)
    turn(sessions, "a", [1] * 30)
    turn(sessions, "b", [1] * 30)
    before = (sessions.begin("b", [1] * 30).blocks, pool.num_free)
    sessions.end("b")
    assert pool.num_holders(before[0][0]) == 1
    assert pool.num_free == before[1] == 6


def test_the_last_prompt_token_is_always_evaluated() -> None:
    sessions = make()
    prompt = list(range(1000))
    assert turn(sessions, "a", prompt) == 1000
    assert turn(sessions, "a", prompt) == 1
    assert turn(sessions, "a", prompt[:500]) == 1
    assert turn(sessions, "b", prompt[:500]) == 1
    assert turn(sessions, "a", [5]) == 1


def test_the_least_recently_used_goes_first_and_the_hook_sees_its_table() -> None:
    evicted: list[tuple[str, int]] = []
    sessions = make(capacity=2, evicted=evicted)
    turn(sessions, "a", [1, 2])
    turn(sessions, "b", [3])
    turn(sessions, "a", [1, 2, 3])
    turn(sessions, "c", [4])
    assert evicted == [("b", 1)]
    assert sessions.kept == ("a", "c")


def test_three_conversations_on_two_places_stay_right_and_within_the_pool() -> None:
    pool = KVPool(BLOCK_SIZE * 8, 64)
    sessions = Sessions(pool, 2)
    histories = {"a": [1] * 70, "b": [2] * 70, "c": [3] * 70}
    for _ in range(3):
        for name, history in histories.items():
            history.append(9)
            turn(sessions, name, history)
            assert len(sessions.kept) <= 2
    assert pool.num_blocks - pool.num_free == 4


def test_a_full_pool_evicts_idle_conversations_before_it_fails() -> None:
    evicted: list[tuple[str, int]] = []
    sessions = make(num_blocks=4, evicted=evicted)
    turn(sessions, "a", [1] * 64)
    turn(sessions, "b", [2] * 64)
    turn(sessions, "c", [3] * 150)
    assert evicted == [("a", 64)]
    table = sessions.begin("d", [4] * 300)
    with pytest.raises(CacheFullError, match="5 more blocks"):
        sessions.reserve(table, 300)
    assert sessions.kept == ("d",)
    assert len(table) == 0


def test_a_conversation_may_fill_the_whole_pool_though_it_shares_blocks_with_another() -> None:
    sessions = make(num_blocks=3)
    turn(sessions, "a", [1] * 100)
    assert turn(sessions, "b", [1] * 99 + [2] * (3 * BLOCK_SIZE - 99)) == 3 * BLOCK_SIZE - 99
    assert sessions.kept == ("b",)


def test_forgetting_gives_the_blocks_back() -> None:
    pool = KVPool(BLOCK_SIZE * 8, 8)
    sessions = Sessions(pool, 4)
    turn(sessions, "a", [1] * 100)
    sessions.forget("a")
    sessions.forget("never seen")
    assert pool.num_free == 8
    assert turn(sessions, "a", [1] * 100) == 100


def test_capacity_zero_reuses_nothing() -> None:
    sessions = make(capacity=0)
    assert turn(sessions, "a", [1, 2, 3]) == 3
    assert turn(sessions, "a", [1, 2, 3, 4]) == 4
    assert sessions.kept == ()


def test_a_request_that_stops_early_leaves_what_was_evaluated() -> None:
    sessions = make()
    table = sessions.begin("a", [1] * 100)
    sessions.reserve(table, 100)
    table.append([1] * 30)
    sessions.end("a")
    assert turn(sessions, "a", [1] * 100) == 70


@given(
    a=st.lists(st.integers(0, 1), max_size=600), b=st.lists(st.integers(0, 1), max_size=600), limit=st.integers(0, 700)
)
def test_the_common_start_is_the_longest_equal_one(a: list[int], b: list[int], limit: int) -> None:
    b = a[: len(b)] + b[len(a) // 2 :]  # share a start often
    n = common_start(a, tuple(b), limit)
    assert a[:n] == b[:n]
    assert n == min(limit, len(a), len(b)) or a[n] != b[n]


def test_an_own_table_is_never_shared_by_its_fork_s_writes() -> None:
    pool = KVPool(BLOCK_SIZE * 8, 8)
    sessions = Sessions(pool, 4)
    turn(sessions, "a", [1] * 70)
    a: BlockTable = sessions.begin("a", [1] * 71)
    sessions.end("a")
    b = sessions.begin("b", [1] * 70)
    sessions.reserve(b, 1)
    assert a.blocks[0] == b.blocks[0]
    assert a.blocks[1] != b.blocks[1]
    sessions.end("b")
