"""Runs the state machine of the cache with fresh seeds: `python tests/fuzz_cache.py [seconds [device]]`."""

from __future__ import annotations

import secrets
import sys
import time

from cache_machine import CacheMachine
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test


def main() -> None:
    """Run for so many seconds (60); a failure prints its steps, and the seed that leads to them."""
    CacheMachine.device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    end = time.monotonic() + (float(sys.argv[1]) if len(sys.argv) > 1 else 60)
    while time.monotonic() < end:
        number = secrets.randbits(32)
        options = settings(
            max_examples=10, stateful_step_count=100, deadline=None, database=None, print_blob=False
        )
        try:
            run_state_machine_as_test(seed(number)(CacheMachine), settings=options)
        except BaseException:
            print(f"failed with seed {number}")
            raise
    print(f"{CacheMachine.num_steps} steps, no failure")


if __name__ == "__main__":
    main()
