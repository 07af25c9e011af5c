"""What reports each mutant of the kernels, as a table: `python -m tools.mutants` from a checkout."""

from __future__ import annotations

from collections import Counter

from tests.helpers.mutation import DIFFERS, all_mutants, build_all


def main() -> int:
    mutants = all_mutants()
    build_all(mutants)
    caught: Counter[tuple[str, str, str]] = Counter()
    print(f"{'kernel':<28} {'kind':<8} {'mutant':<42} {'flavour':<8} reported as")
    for mutant in mutants:
        report = mutant.report()
        says = mutant.says if report is not None and mutant.says in report else "NOT REPORTED"
        caught[mutant.kind, "comparison" if says == DIFFERS else mutant.flavour, says] += 1
        print(f"{mutant.entry:<28} {mutant.kind:<8} {mutant.name:<42} {mutant.flavour:<8} {says}")
    print(f"\n{len(mutants)} mutants")
    for (kind, flavour, says), count in sorted(caught.items()):
        print(f"{count:>4} {kind:<8} {flavour:<10} {says}")
    return 1 if any(says == "NOT REPORTED" for _, _, says in caught) else 0


if __name__ == "__main__":
    raise SystemExit(main())
