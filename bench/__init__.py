"""Benchmarks that anyone can run: all-reduce beside its peers, memory limits, training.

The library never imports them.
"""
