"""The NumPy definition, which frameworks and kernels equal bit for bit."""
