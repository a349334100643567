"""What tilting buys on real data: every method tuned by the same rule, then compared at the same cost.

cd benchmarks
python -m evidence noisy rates --out RUNS                     # milliseconds of a step of every method, alone
python -m evidence noisy work --out RUNS --data-root DATA     # as many of these as the machine carries, on one folder
python -m evidence noisy table --out RUNS

Killed at any moment, the same command goes on; see :mod:`evidence.study` for the rule.
"""
