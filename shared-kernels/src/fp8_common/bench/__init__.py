"""Decides how speed is judged: `fp8-bench` on a GPU, `fp8-bench --static` on any machine."""
