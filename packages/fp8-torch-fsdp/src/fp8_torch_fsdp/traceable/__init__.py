"""A second way to shard, made of operators that torch.compile captures: one graph holds products and collectives.

FSDP2 gathers in hooks, which Dynamo skips: no compiler sees its collectives. Here each linear layer is one autograd
function on the local shard, which gathers FP8 codes in the forward and again in the backward, and averages the
gradient of the weight there. Numbers, parameters and state dicts are those of FSDP2.
"""
