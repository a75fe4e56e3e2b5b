"""Benchmarks and pictures, each a program: `python -m benchmarks.bench_fsdp` in the root of a checkout."""
