"""A real training step spread over ranks, one file per kind; torch.distributed has been joined."""
