"""Evidence: gathered on the ranks (tensors, generations, throughput, memory), scored and mirrored on the control side."""
