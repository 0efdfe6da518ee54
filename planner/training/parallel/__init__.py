"""A real training step under DeepSpeed's ZeRO; torch.distributed has been joined."""
