"""What tests of several packages share: ranks, counted collectives, pretended GPUs, the repository's files.

Every pytest run of this repository finds it by this name, with whatever packages are installed: the root is on the
path (`pythonpath` in pyproject.toml). A module here imports only what its own users have.
"""
