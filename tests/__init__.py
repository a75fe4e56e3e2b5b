"""Tests of the whole repository, and `tests.helpers`, which the tests of every package import."""
