"""Sharding whose collectives torch.compile captures.

FSDP2 gathers in hooks, which Dynamo does not trace, so compiled graphs do not contain its collectives. Here each linear
layer is an autograd function of the local shard: it gathers FP8 codes in the forward and again in the backward, where
it also averages the weight's gradient. Results, parameters and state dicts equal FSDP2's.
"""
