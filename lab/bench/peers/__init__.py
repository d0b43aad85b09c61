"""``mpic bench peers``: MPIC beside the servers that people would run instead, on the same random weights.

Each peer is a file: ``native.py`` (MPIC itself), ``stock.py`` (transformers), ``plain_vllm.py``, ``lmcache_server.py``,
``llama_server.py`` (with ``gguf_file.py``, which writes the weights in its format), ``openvino_genai.py``. Servers are
started by ``process.py``. ``weights.py`` saves the weights that all load, ``prompts.py`` defines the questions and
sizes, ``cases.py`` the measurements and checks, ``groups.py`` which peers start together; ``rounds.py`` lets them take
turns, and ``peers.py`` is the bench.
"""
