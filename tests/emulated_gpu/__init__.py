"""Emulated GPUs: a stand-in driver and what real CuPy needs to run on it. Test code, never shipped.

Knows nothing of gpuallreduce's algorithms.
"""
