"""Sharding by operators that torch.compile captures, collectives included.

FSDP2 gathers in hooks, which Dynamo skips: no compiler sees its collectives. Here each linear layer is one autograd
function on the local shard, which gathers FP8 codes in the forward and again in the backward, and averages the gradient
of the weight there. Numbers, parameters and state dicts equal FSDP2's.
"""
