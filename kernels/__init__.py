"""Kernel sources, shipped as data: CUDA C++ that NVRTC, nvcc, g++ and clang++ compile unchanged.

Holds no Python.
"""
