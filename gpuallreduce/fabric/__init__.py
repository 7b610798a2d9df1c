"""Engines that other people wrote for reductions between GPUs and machines, one file each.

A fabric is verbs on addresses: it knows nothing of algorithms, plans or arrays.
"""
