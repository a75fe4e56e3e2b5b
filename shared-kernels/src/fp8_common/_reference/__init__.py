"""NumPy definition of all values, which frameworks and kernels equal bitwise."""
