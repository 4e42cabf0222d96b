"""The released vLLM, unpatched, as an engine: driven through its public entry points, audited in its workers."""
