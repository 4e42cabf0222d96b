"""Rank side: engines, models, kernels and loading. Imports the standard library, torch, numpy and safetensors only."""
