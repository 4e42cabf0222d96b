"""Records in, verdict out: no GPU, no cluster, so that old runs can be judged again by better rules."""
