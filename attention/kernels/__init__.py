"""Attention on GPUs: launches of Triton kernels; imports no Triton by itself (part of attention)."""
