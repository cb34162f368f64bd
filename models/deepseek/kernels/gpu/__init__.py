"""Triton kernels of the GPU path: each beside its slow torch twin, its cost and its compile cases.

A module here is imported only by who wants it; without triton it can still be imported and tells
its costs, and its kernels say what is missing when they are called (language.py).
"""
