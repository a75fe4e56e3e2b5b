"""Training demos, one program for each plugin: `python -m demos.torch_fsdp`, `.te_init`, `.jax_owg`.

They are not part of any package. Run them in the root of a checkout, or with it on PYTHONPATH.
"""
