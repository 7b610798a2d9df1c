"""Calls of ranks on several nodes: shards are folded and gathered inside each node by our kernels,
and travel between nodes by an engine, chunk by chunk.

Knows nothing of how ranks meet, nor of how a node's ranks address each other's memory.
"""
