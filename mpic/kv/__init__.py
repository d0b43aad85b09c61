"""KV of chunks and requests: identities, files, and the page pool."""
