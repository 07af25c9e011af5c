"""Faults: each one damages something that the canary then finds, for the reasons that the fault names."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_kvcanary.constants import FailReason
from cupy_kvcanary.faults import FAULTS, Fault, Injection
from cupy_kvcanary.injections import Injections, parse_faults
from tests.helpers.fault_site import SmallCache, reasons_of

WINDOW = 24


def inject(fault: Fault, cache: SmallCache, seed: int = 0) -> Injection:
    """One step with the fault, and one that reads what it wrote."""
    cache.begin()
    injection = None if fault.is_after_step else fault(cache.site(seed))
    cache.verify()
    cache.forward()
    site = cache.site(seed)
    cache.stamp()
    if fault.is_after_step:
        injection = fault(site)
    cache.step()
    assert injection is not None
    return injection


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "window"),
    [(name, window) for name in FAULTS for window in (0, WINDOW) if window or not FAULTS[name].needs_window],
)
def test_a_fault_is_found_for_the_reasons_it_names(name: str, window: int, seed: int) -> None:
    fault = FAULTS[name]
    cache = SmallCache(window=window, seed=seed)
    cache.step()
    assert not cache.found()

    injection = inject(fault, cache, seed)
    violations = cache.found()
    assert reasons_of(violations) & fault.shows_as == fault.shows_as
    assert {violation.request_row for violation in violations} == set(injection.rows)
    assert injection.fault == name
    assert not cache.canary.health().errors


@pytest.mark.parametrize("name", FAULTS)
def test_equal_seeds_damage_the_same(name: str) -> None:
    injections = []
    for seed in (3, 3, 4, 5, 6):
        cache = SmallCache(window=WINDOW)
        injections.append(inject(FAULTS[name], cache, seed))
    assert injections[0] == injections[1]
    assert len(set(injections)) > 1


@pytest.mark.parametrize("name", FAULTS)
def test_requests_that_end_too_soon_are_no_target(name: str) -> None:
    cache = SmallCache(window=WINDOW)
    cache.begin()
    before = [array.copy() for array in (cache.page_table, cache.mapping, cache.kv, cache.input_ids)]
    assert FAULTS[name](cache.site(steps_to_find=9)) is None
    for array, kept in zip((cache.page_table, cache.mapping, cache.kv, cache.input_ids), before, strict=True):
        np.testing.assert_array_equal(array, kept)


@pytest.mark.parametrize("name", ["record-lost", "kv-bit-flipped-before", "kv-bit-flipped-after"])
def test_one_buffer_of_a_window_is_damaged_only_where_it_is_still_read(name: str) -> None:
    for seed in range(20):
        cache = SmallCache(window=5, seed=seed)
        inject(FAULTS[name], cache, seed)
        assert cache.found(), f"seed {seed}"


def test_without_expected_tokens_a_swapped_token_is_not_seen() -> None:
    cache = SmallCache(expected_tokens=False)
    inject(FAULTS["token-swapped"], cache)
    assert not cache.found()


def test_without_expected_tokens_exchanged_rows_show_at_the_seam_only() -> None:
    cache = SmallCache(expected_tokens=False)
    injection = inject(FAULTS["rows-exchanged"], cache)
    violations = cache.found()
    assert reasons_of(violations) == FailReason.VERIFY_CHAIN_HASH
    longer = max(injection.rows, key=lambda row: cache.prefix_lens[row - 1])
    assert {violation.request_row for violation in violations} == {longer}
    assert len({violation.position for violation in violations}) == 1


def test_a_bit_that_flips_between_forward_and_stamping_cannot_be_seen() -> None:
    """The record is made of the bytes that are there: why `kv-bit-flipped-after` comes behind the stamping."""
    cache = SmallCache()
    cache.begin()
    cache.verify()
    cache.forward()
    assert FAULTS["kv-bit-flipped-after"](cache.site()) is not None
    cache.stamp()
    cache.step()
    assert not cache.found()


# ---- the order of injections ----------------------------------------------------------------------------------------


def injections_of(*texts: str, num_requests: int = 10) -> Injections:
    asked = parse_faults(texts, has_window=False)
    return Injections(asked, num_requests=num_requests, steps_to_find=2, rng=np.random.default_rng(0))


def test_all_stands_for_every_fault_that_is_possible() -> None:
    names = [asked.fault.name for asked in parse_faults(["all"], has_window=True)]
    assert names == list(FAULTS)
    assert "stale-mapping" not in [asked.fault.name for asked in parse_faults(["all"], has_window=False)]
    assert parse_faults(["late-write@12"], has_window=False)[0].step == 12


def test_the_next_fault_waits_until_the_last_one_is_found_and_undone() -> None:
    cache = SmallCache()
    cache.begin()
    injections = injections_of("table-entry-swapped@0", "late-write@0")

    def inject_at(step: int) -> Injection | None:
        return injections.inject(step, 0.0, 0, lambda: cache.site(step=step), is_after_step=False)

    first = inject_at(0)
    assert first is not None
    assert inject_at(1) is None
    assert not injections.must_restore(1)
    cache.verify()
    injections.attribute(1, cache.found(), lost=3)
    assert injections.must_restore(1)
    assert injections.damaged_rows == first.rows
    injections.restored(1)
    assert injections.damaged_rows == ()
    assert inject_at(2) is None, "a report of step 1 may still come"
    second = inject_at(3)
    assert second is not None
    assert [outcome.fault for outcome in injections.outcomes] == ["table-entry-swapped", "late-write"]
    assert (injections.outcomes[0].delay, injections.outcomes[1].delay) == (1, None)
    assert injections.outcomes[0].violations > 3
    assert injections.false_alarms == 0


def test_a_fault_that_is_not_found_is_given_up_and_undone() -> None:
    cache = SmallCache()
    cache.begin()
    injections = injections_of("late-write@0")
    assert injections.inject(0, 0.0, 0, lambda: cache.site(step=0), is_after_step=False) is not None
    assert [injections.must_restore(step) for step in (1, 2, 3, 4)] == [False, False, False, True]
    injections.restored(4)
    (outcome,) = injections.outcomes
    assert outcome.found_step is None
    assert outcome.delay is None


def test_violations_of_other_rows_and_of_what_was_undone_are_false_alarms() -> None:
    cache = SmallCache()
    cache.begin()
    injections = injections_of("table-entry-swapped@0")
    injection = injections.inject(0, 0.0, 0, cache.site, is_after_step=False)
    assert injection is not None
    cache.verify()
    violations = cache.found()
    injections.restored(0)
    injections.attribute(1, violations, lost=2)
    assert injections.false_alarms == len(violations) + 2


def test_a_withdrawn_fault_is_injected_again() -> None:
    cache = SmallCache()
    cache.begin()
    injections = injections_of("late-write@0")
    assert injections.inject(0, 0.0, 0, cache.site, is_after_step=False) is not None
    injections.withdraw()
    assert injections.outcomes[0].injection is None
    again = injections.inject(5, 0.0, 0, lambda: cache.site(step=5), is_after_step=False)
    assert again is not None
    assert again.step == 5


def test_faults_without_a_step_are_spread_over_the_requests() -> None:
    injections = injections_of("all", num_requests=1000)
    due = [waiting.finished for waiting in injections._waiting]
    assert due == sorted(due)
    assert 100 <= due[0] < 200
    assert 600 < due[-1] <= 700
