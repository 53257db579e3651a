"""Tests of the tests: faults planted in the CUDA kernels, each of which a named check must catch."""
