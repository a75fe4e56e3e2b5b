"""`python -m demos.te_init`: train a small language model whose masters start from different sources.

One process on one core, about a minute for the default of 120 steps; `--steps` asks for more. What differs between the
runs is where the FP32 masters come from; the FP8 weights of the first step are the same codes in all of them.
"""
