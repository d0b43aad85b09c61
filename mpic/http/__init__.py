"""HTTP helpers for the server and the web interface: error responses, JSON bodies, server-sent events, hosts."""
