"""Finding references for a prompt: the open_clip embedder, the index, the retriever (`mpic.retriever`)."""
