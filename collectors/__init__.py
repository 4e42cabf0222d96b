"""Evidence: gathered on the ranks (tensors, answers, speed, memory), scored and mirrored on the control side."""
