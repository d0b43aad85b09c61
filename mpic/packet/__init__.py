"""KV Packet (arXiv 2604.13226): adapters of a model, their file format, and their training."""
