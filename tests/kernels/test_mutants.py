"""The sanitizers of the host harness bite: every mutant of every kernel is reported, and no kernel as it is."""

from __future__ import annotations

import pytest

from tests.helpers.mutation import SITES, Kind, Mutant, all_mutants, build_all, uncovered_sites

MUTANTS = all_mutants()


@pytest.fixture(scope="module")
def _built() -> None:
    build_all(MUTANTS)


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.entry}, {mutant.kind}: {mutant.name}")
def test_mutant_is_reported(mutant: Mutant) -> None:
    assert mutant.report_unmutated() is None
    text = mutant.report()
    assert text is not None, "nothing reported"
    for part in mutant.expected:
        assert part in text, f"{part!r} not in:\n{text}"


@pytest.mark.parametrize("kind", SITES)
def test_no_place_is_without_a_mutant(kind: Kind) -> None:
    assert list(uncovered_sites(kind, MUTANTS)) == []


def test_a_place_without_a_mutant_is_found() -> None:
    for kind in SITES:
        others = [mutant for mutant in MUTANTS if mutant.kind != kind]
        assert list(uncovered_sites(kind, others)) != [], kind
