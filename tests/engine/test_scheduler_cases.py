"""Faults that other servers have had (ids of the case list), re-told for the scheduler."""

from __future__ import annotations

import random

import pytest

from tests.engine.rig import EOS, Rig, adapter, prompt


def test_sc01_as_many_adapters_as_fit_and_base_rows_besides() -> None:
    """SC-01: base rows take no adapter memory; bursts of 4 adapters and 2 base requests on 4 slots, with random cancels
    and a small KV pool, 60 rounds: all finish with their own text."""
    rig, rng = Rig(num_blocks=40, slots=4), random.Random(1)
    for round_ in range(60):
        burst = [
            rig.add(f"{round_}.{index}", prompt(rng.randint(1, 30), index % 2), ref, max_tokens=rng.randint(1, 30))
            for index, ref in enumerate([*map(adapter, range(4)), None, None])
        ]
        for _ in range(rng.randint(0, 10)):
            rig.step()
        gone = {one.id for one in burst if rng.random() < 0.3}
        for id in gone:
            rig.core.abort(id)
        rig.run()
        for request in burst:
            if request.id not in gone:
                rig.assert_right(request)
    rig.assert_idle()
    assert rig.residency.num_evictions == 0


def test_sc02_more_adapters_than_memory() -> None:
    """SC-02: 12 adapters on 2 slots, all at once and then one after the other: all 24 are right."""
    rig = Rig(slots=2)
    at_once = [rig.add(f"a{index}", prompt(9), adapter(index), max_tokens=12) for index in range(12)]
    rig.run()
    for index in range(12):
        at_once.append(rig.add(f"b{index}", prompt(9), adapter(index), max_tokens=12))
        rig.run()

    for request in at_once:
        rig.assert_right(request)
    rig.assert_idle()


def test_sc03_a_running_adapter_is_not_the_one_to_go() -> None:
    """SC-03: A1 ends, A5 arrives while A2, admitted least recently, still runs: A1's place is taken."""
    rig = Rig(slots=4, delay=0)
    order = [adapter(index) for index in (2, 1, 3, 4)]
    running = [
        rig.add(ref.digest, prompt(5), ref, max_tokens=6 if ref == adapter(1) else 60, ignore_eos=True) for ref in order
    ]
    while (running[1].id, 0) not in rig.finished:
        rig.step()
    last = rig.add("A5", prompt(5), adapter(5), max_tokens=5)
    rig.run()

    assert ("evict", adapter(1).digest) in rig.bank.history
    assert [event for event, _ in rig.bank.history].count("evict") == 1
    for request in [*running, last]:
        rig.assert_right(request)


@pytest.mark.parametrize("slots", [1, 2])
def test_sc04_steady_traffic_does_not_starve_another_adapter(slots: int) -> None:
    """SC-04: tenant 1 keeps 8 requests of resident adapters in flight for ever; tenant 2's one request for another
    adapter has its first token within two of the longest generations, and the steady traffic goes on."""
    rig, length = Rig(num_blocks=200, slots=slots), 40
    count = 0

    def top_up() -> None:
        nonlocal count
        while sum(id.startswith("t1") for id in rig.scheduler.requests) < 8:
            count += 1
            rig.add(f"t1.{count}", prompt(5), adapter(count % slots), lane="t1", max_tokens=length - count % 8,
                    ignore_eos=True)  # fmt: skip

    for _ in range(60):
        top_up()
        rig.step()
    arrived = rig.num_steps
    late = rig.add("t2", prompt(5), adapter(9), lane="t2", max_tokens=5)
    for _ in range(5 * length):
        top_up()
        rig.step()

    assert rig.first_step["t2"] - arrived <= 2 * length
    rig.assert_right(late)
    before = count
    for _ in range(3 * length):
        top_up()
        rig.step()
    assert count > before + 8


@pytest.mark.parametrize("budget", [1, 7, 16, 32, 1000])
def test_sc05_prompts_in_chunks(budget: int) -> None:
    """SC-05: prompts of 10, 33, 100, 250 tokens on A1, A2, base, A3 at once while 3 decode: right at every budget, and
    never above it."""
    rig = Rig(num_blocks=200, max_batched_tokens=budget, max_model_len=400)
    requests = [rig.add(f"d{index}", prompt(4, index), None, max_tokens=40, ignore_eos=True) for index in range(3)]
    for _ in range(6):
        rig.step()
    for length, ref in ((10, adapter(1)), (33, adapter(2)), (100, None), (250, adapter(3))):
        requests.append(rig.add(str(length), prompt(length), ref, max_tokens=10))
    while rig.core.has_work:
        before = rig.runner.num_computed
        rig.step()
        assert rig.runner.num_computed - before <= budget

    for request in requests:
        rig.assert_right(request)


def test_sc07_batches_with_and_without_adapters() -> None:
    """SC-07: adapters first, then base only; A1 only; A1 ending while base goes on; everything aborted at once."""
    rig = Rig()
    requests = [rig.add("1", prompt(6), adapter(1), max_tokens=5)]
    rig.run()
    requests += [rig.add("2", prompt(6), None, max_tokens=5)]
    rig.run()
    requests += [rig.add("3", prompt(7), adapter(1), max_tokens=3), rig.add("4", prompt(7), None, max_tokens=20)]
    rig.run()
    for index in range(6):
        rig.add(f"gone{index}", prompt(8), adapter(index), max_tokens=50)
    rig.step()
    for index in range(6):
        rig.core.abort(f"gone{index}")
    assert rig.step() == []

    rig.run()
    for request in requests:
        rig.assert_right(request)
    rig.assert_idle()


def test_sc09_a_big_request_neither_blocks_nor_starves() -> None:
    """SC-09: the head needs 60 % of a nearly full pool: small ones behind it go on, in its own lane too; a stream of
    small ones that never ends passes it a bounded number of times."""
    rig = Rig(num_blocks=50, max_num_seqs=32)
    for index in range(6):
        rig.add(f"old{index}", prompt(20, index), None, max_tokens=8 + index, ignore_eos=True)
    rig.step()
    big = rig.add("big", prompt(116, 7), None, lane="x", max_tokens=4, ignore_eos=True)
    passed, count = 0, 0
    while "big" not in rig.first_step:
        rig.add(f"small{count}", prompt(3, 8), None, lane="x", max_tokens=4, ignore_eos=True)
        count += 1
        rig.step()
        assert count < 200
    passed = sum(id.startswith("small") for id in rig.first_step)
    rig.run()

    assert passed >= 10
    assert passed <= 16 + 4
    rig.assert_right(big)


def test_sc13_a_long_prompt_does_not_stall_decodes() -> None:
    """SC-13: while a prompt of max_model_len − 10 is computed in chunks, every decoding row gets a token every step."""
    rig = Rig(num_blocks=200, max_batched_tokens=32, max_model_len=300)
    decoding = [rig.add(f"d{index}", prompt(3, index), None, max_tokens=100, ignore_eos=True) for index in range(4)]
    for _ in range(3):
        rig.step()
    rig.add("long", prompt(290, 5), None, max_tokens=4)
    for _ in range(10):
        events = rig.step()
        assert {event.id for event in events} >= {one.id for one in decoding}
    rig.run()


def test_kv01_aborts_give_everything_back_at_once() -> None:
    """KV-01: 20 plain and 20 streaming requests vanish while queued, before the first token and after three chunks:
    nothing runs, waits or is held."""
    rig = Rig(num_blocks=100, max_num_seqs=10)
    for index in range(40):
        rig.add(str(index), prompt(10, index), adapter(index % 3) if index % 2 else None, max_tokens=200)
        if index % 8 == 0:
            rig.step()
    for index in range(40):
        rig.core.abort(str(index))

    rig.assert_idle()
    assert rig.scheduler.running == []
    assert rig.pool.num_free == 100


@pytest.mark.parametrize("budget", [3, 7, 1000])
def test_kv02_preemption_loses_and_repeats_nothing(budget: int) -> None:
    """KV-02: 8 requests of 60 tokens on a pool that holds two of them: preemption happens, and no token is lost,
    doubled or changed; cached_tokens stays what it was at first admission."""
    rig = Rig(num_blocks=36, max_num_seqs=8, max_batched_tokens=budget)
    requests = [
        rig.add(str(index), prompt(9, index), adapter(index % 3) if index % 2 else None, max_tokens=60, ignore_eos=True)
        for index in range(8)
    ]
    rig.run()

    assert rig.scheduler.num_preemptions > 0
    for request in requests:
        rig.assert_right(request)
    assert {chunk.num_cached_tokens for chunk in rig.chunks} == {0}
    assert rig.scheduler.progress.num_generated_tokens == 8 * 60


def test_kv08_preemption_takes_no_more_than_needed() -> None:
    """KV-08: room for 3 sequences, 12 long requests: every step produces tokens, preempts only while no block is free,
    the first by rank only if no other may give way, and all finish in bounded time."""
    rig = Rig(num_blocks=30, max_num_seqs=12)
    requests = [rig.add(str(index), prompt(8, index), None, max_tokens=30, ignore_eos=True) for index in range(12)]
    while rig.core.has_work:
        held = {one: len(one.blocks) for one in rig.scheduler.running}
        first, before = rig.scheduler.running[:1], rig.scheduler.num_preemptions
        step = rig.scheduler.schedule(rig.now)
        assert step is not None
        victims = [one for one in held if one not in rig.scheduler.running]
        assert len(victims) == rig.scheduler.num_preemptions - before, "preempted and admitted in one step"
        assert not victims or rig.pool.num_free <= held[victims[0]], "the last to give way gave in vain"
        others = [one for one in held if one not in first]
        assert set(first) <= set(rig.scheduler.running) or not any(one.may_yield for one in others)
        assert rig.take(rig.scheduler.commit(step, rig.runner.run(step)))
        rig.check()
    for request in requests:
        rig.assert_right(request)
    assert rig.scheduler.num_preemptions > 0
    assert rig.runner.steps < 12 * 40


def test_kv11_abort_in_every_phase() -> None:
    """KV-11: queued, mid-prefill, decoding, preempted, waiting for an adapter or for memory, just finished, between
    schedule and commit, twice, unknown: the engine lives, and everybody else's text is right."""
    rng = random.Random(5)
    rig = Rig(num_blocks=30, slots=2, max_batched_tokens=16)
    kept = []
    for index in range(200):
        ref = adapter(index % 3) if index % 4 else None
        request = rig.add(
            str(index), prompt(rng.randint(1, 40), index % 2), ref, max_tokens=rng.randint(1, 30), n=1 + index % 2
        )
        kept.append(request)
        for _ in range(rng.randint(0, 3)):
            step = rig.scheduler.schedule(rig.now) if rng.random() < 0.2 else None
            if step is None:
                rig.step()
                continue
            victim = rng.choice(step.rows).sequence.request_id
            sampled = rig.runner.run(step)
            rig.core.abort(victim)
            kept = [one for one in kept if one.id != victim]
            rig.take(rig.scheduler.commit(step, sampled))
        if rng.random() < 0.5:
            victim = rng.choice(list(rig.scheduler.requests) or ["none"])
            rig.core.abort(victim)
            rig.core.abort(victim)
            kept = [one for one in kept if one.id != victim]
            rig.check()
    rig.run()
    rig.assert_idle()
    assert rig.scheduler.num_preemptions > 0
    for request in kept:
        rig.assert_right(request)


def test_kv12_a_step_with_nothing_to_run() -> None:
    """KV-12: no requests; all aborted between schedule and commit; all waiting for a load: the loop idles without a
    fault, says so, and wakes at the next arrival."""
    rig = Rig(slots=1)
    assert rig.step() == []
    assert not rig.core.can_run
    rig.add("1", prompt(5), None)
    step = rig.scheduler.schedule(rig.now)
    assert step is not None
    sampled = rig.runner.run(step)
    rig.core.abort("1")
    assert rig.scheduler.commit(step, sampled) == []
    rig.fetcher.is_stuck = True
    rig.add("2", prompt(5), adapter(1), max_tokens=3)
    for _ in range(5):
        assert rig.step() == []
        assert not rig.core.can_run

    third = rig.add("3", prompt(5), None, max_tokens=3)
    assert rig.core.can_run
    rig.step()
    assert rig.outputs["3", 0]
    rig.fetcher.is_stuck = False
    rig.run()
    rig.assert_right(third)


def test_pc02_prefixes_are_not_shared_between_adapters() -> None:
    """PC-02: the same prompt under base, A1, A2, base, A1: the first of each computes it all, the second finds it."""
    rig = Rig()
    cached = []
    for index, ref in enumerate([None, adapter(1), adapter(2), None, adapter(1)]):
        request = rig.add(str(index), prompt(41), ref, max_tokens=5)
        rig.run()
        rig.assert_right(request)
        cached.append(rig.chunks[-1].num_cached_tokens)

    assert cached == [0, 0, 0, 40, 40]


@pytest.mark.parametrize("has_tiers", [False, True])
def test_pc03_prefixes_are_not_shared_between_salts(has_tiers: bool) -> None:
    """PC-03: a prompt of 500 tokens that another tenant has sent, and whose blocks lie on the device, or on host and
    disk, is as cold as one that nobody has sent: nothing is cached, as many tokens are computed, and the first token
    comes after as many steps. Its own second call is warm."""
    rig = Rig(
        num_blocks=130 if has_tiers else 270,
        num_slots=260 * has_tiers,
        num_files=500 * has_tiers,
        max_batched_tokens=100,
        max_model_len=600,
    )
    seen = []
    for index, salt in enumerate(["t1", "t2", "t2", "t1"]):
        if has_tiers:
            for _ in range(4):
                rig.add(
                    f"flush{len(rig.outputs)}", prompt(500, 1), None, cache_salt=str(len(rig.outputs)), max_tokens=1
                )
                rig.run()
        computed, steps = rig.runner.num_computed, rig.num_steps
        rig.add(str(index), prompt(500), None, cache_salt=salt, max_tokens=5, ignore_eos=True)
        rig.run()
        found = rig.chunks[-1].num_cached_tokens
        seen.append((found, rig.runner.num_computed - computed, rig.first_step[str(index)] - steps))

    assert seen[0] == seen[1] == (0, 504, 5)
    if not has_tiers:
        assert seen[2] == seen[3] == (496, 8, 1)
    else:
        assert seen[2][0] > 0
        assert seen[2][1] == 504 - seen[2][0]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("length", [16, 32, 48])
def test_pc05_a_prompt_of_whole_blocks_computes_its_last_token(length: int, n: int) -> None:
    """PC-05: prompts of exactly 1, 2, 3 blocks, sent twice: the second answer is the first, and at least one prompt
    token is computed."""
    rig = Rig(block_size=16)
    for id in ("1", "2"):
        request = rig.add(id, prompt(length), None, n=n, max_tokens=20)
        rig.run()
        rig.assert_right(request)

    assert rig.outputs["1", 0] == rig.outputs["2", 0]
    assert rig.chunks[-1].num_cached_tokens == length - 16


def test_pc06_generated_tokens_are_cached_under_their_adapter() -> None:
    """PC-06: a conversation that changes its adapter at every turn finds only what that adapter has computed."""
    rig = Rig()
    history = prompt(10)
    cached = []
    for turn, ref in enumerate([adapter(1), None, adapter(2), adapter(1)]):
        request = rig.add(str(turn), list(history), ref, max_tokens=15, ignore_eos=True)
        rig.run()
        rig.assert_right(request)
        cached.append(rig.chunks[-1].num_cached_tokens)
        history += rig.outputs[str(turn), 0] + [5, 6]

    assert cached == [0, 0, 0, 24]


@pytest.mark.parametrize("num_slots", [0, 8, 200])
def test_pc07_recycled_blocks_are_not_found_by_their_old_prefix(num_slots: int) -> None:
    """PC-07: 12 blocks, 20 prompts of 3 blocks, then the first again, and the last, by two tenants, without and with
    host memory that is recycled too: every text is right (the runner checks every slot that is read); what was recycled
    is not found, what is still there is."""
    rig = Rig(num_blocks=12, block_size=16, max_num_seqs=3, num_slots=num_slots)
    prompts = [[3 + (index * 50 + position) % 997 for position in range(48)] for index in range(20)]
    requests = []
    for order in (range(20), [0, 19, 0, 19]):
        for index in order:
            for salt in ("t1", "t2"):
                requests.append(
                    rig.add(str(len(requests)), prompts[index], None, cache_salt=salt, max_tokens=4, ignore_eos=True)
                )
                if len(requests) % 3:
                    rig.run()
                rig.step()
        rig.run()
    cached = {chunk.id: chunk.num_cached_tokens for chunk in rig.chunks}

    for request in requests:
        rig.assert_right(request)
    assert {cached[str(index)] for index in range(40)} == {0}
    assert cached["40"] == cached["41"] == (32 if num_slots == 200 else 0)
    assert cached["44"] > 0


def test_pc09_crafted_prompts_do_not_meet() -> None:
    """PC-09: prompts whose ids collide in weak hashes (+31/−1 on neighbours, swapped, shifted) get their own text."""
    rig = Rig(block_size=4)
    base = [100, 200, 300, 400, 7]
    variants = [
        base,
        [101, 169, 300, 400, 7],
        [200, 100, 300, 400, 7],
        [100, 200, 400, 300, 7],
        [0, 0, 0, 0, 7],
        [0, 0, 0, 1, 7],
    ]
    for index, ids in enumerate(variants):
        request = rig.add(str(index), ids, None, max_tokens=8)
        rig.run()
        rig.assert_right(request)
        assert rig.chunks[-1].num_cached_tokens == 0


def test_hs01_new_adapters_wait_for_room() -> None:
    """HS-01: A1 and A2 stream on 2 slots; A3 and A4 arrive in the middle, 20 times at random moments: the running
    texts stay their own, the new ones wait and are right too."""
    for seed in range(20):
        rig, rng = Rig(slots=2), random.Random(seed)
        requests = [rig.add(f"A{i}", prompt(6), adapter(i), max_tokens=60, ignore_eos=True) for i in (1, 2)]
        for i in (3, 4):
            for _ in range(rng.randint(1, 40)):
                rig.step()
            requests.append(rig.add(f"A{i}", prompt(6), adapter(i), max_tokens=10))
        rig.run()
        for request in requests:
            rig.assert_right(request)


def test_hs02_unloading_while_requests_run() -> None:
    """HS-02: evict during 4 streams, two of which vanish at that moment: the others finish on their weights, and the
    memory is free after the last."""
    rig = Rig(slots=2)
    requests = [rig.add(str(i), prompt(6), adapter(1), max_tokens=40, ignore_eos=True) for i in range(4)]
    for _ in range(10):
        rig.step()
    rig.core.evict(adapter(1).digest)
    rig.core.abort("0")
    rig.core.abort("1")
    assert rig.residency.used_bytes > 0
    rig.run()

    for request in requests[2:]:
        rig.assert_right(request)
    assert rig.residency.used_bytes == 0


def test_hs07_unloading_after_parallel_sampling() -> None:
    """HS-07: after n = 8 traffic, an evicted adapter's memory is free at once."""
    rig = Rig(num_blocks=200)
    for index in range(4):
        rig.add(str(index), prompt(9), adapter(1), n=8, max_tokens=30)
    rig.run()
    rig.core.evict(adapter(1).digest)

    assert rig.residency.used_bytes == 0
    assert rig.residency.states(rig.now) == []


def test_st10_every_eos_counts() -> None:
    """ST-10: ignore_eos ignores the end-of-sequence ids, min_tokens holds back both them and stop ids."""
    rig = Rig()
    seen = rig.expected(rig.add("probe", prompt(5), None, max_tokens=40, ignore_eos=True))
    rig.run()
    assert seen == rig.outputs["probe", 0]
    stop = seen[7]
    early = rig.add("early", prompt(5), None, max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
    late = rig.add("late", prompt(5), None, max_tokens=40, ignore_eos=True, stop_token_ids=[stop], min_tokens=20)
    rig.run()
    rig.assert_right(early)
    rig.assert_right(late)

    last = next(chunk for chunk in reversed(rig.chunks) if chunk.id == "early")
    assert (last.finish, last.stop_id, rig.outputs["early", 0][-1]) == ("stop", stop, stop)
    assert len(rig.outputs["late", 0]) >= 20
    assert EOS not in (stop,)
