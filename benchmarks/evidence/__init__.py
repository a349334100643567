"""What tilting buys on real data: every method tuned by the same rule, then compared at the same cost.

cd benchmarks
python -m evidence rates noisy --out RUNS --record RECORD                    # what a step of every method costs, alone
python -m evidence work noisy --out RUNS --record RECORD --data-root DATA    # as many of these as the machine carries
python -m evidence table noisy --out RUNS --record RECORD
python -m evidence collect noisy --out RUNS --record RECORD                  # all runs in one file, no weights

Killed at any moment, the same command goes on; see :mod:`evidence.study` for the rule.
"""
