"""`python -m demos.torch_fsdp`: train a small language model on real text, first with bf16, then with FP8.

Two processes share the weights with FSDP2. Both runs see the same seeds and the same batches; what differs is what
the weights of the linear layers are made of when they travel.
"""
