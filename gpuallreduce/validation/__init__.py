"""Checks that a machine computes what the numeric contract promises, and says where it does not.

Knows nothing of command lines or of how a collective runs.
"""
