"""Tokens that go to experts on other ranks as FP8 codes."""
