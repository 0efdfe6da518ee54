"""What `torch.compile` makes of a step on shapes: its graph, its partition, its buffers.

AOTAutograd traces forward and backward into one graph (`recording`, `decompositions`), the min-cut
partitioner decides what forward keeps for backward (`partition`), Inductor fuses and frees
(`buffers`). Transcribed from torch 2.13; nothing here imports it.
"""
