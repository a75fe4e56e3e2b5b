"""Benchmarks of the kernels: `fp8-bench` on a GPU, `fp8-bench --static` on any machine."""
