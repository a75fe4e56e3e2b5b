"""`python -m demos.jax_owg`: train a small pipelined language model on real text, in float32 and in FP8.

All runs see the same seeds and batches. FP8-MAX combines what the microbatches observe by MAX; FP8-SUM, as a warning,
adds it up, which is what autodiff does with a parameter that a loop uses several times.
"""
