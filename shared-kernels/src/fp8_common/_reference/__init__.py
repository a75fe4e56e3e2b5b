"""The definition of all numbers in NumPy, which every framework and every kernel equals bit for bit."""
