"""The weight lifecycle: read, map names, narrow per rank, place, fill padding, post-process, finalise, reload."""
