"""The static cost of a training step on a GPU that is not there: launches, bytes and FLOPs, and modelled times."""
