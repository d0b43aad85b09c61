"""``mpic bench peers``: MPIC beside what people would run instead, on the very same random weights.

Each peer is a file: ``native.py`` (MPIC itself), ``stock.py`` (transformers), ``plain_vllm.py``, ``llama_server.py``
(with ``gguf_file.py``, which writes the weights in its format). ``prompts.py`` says what they are asked, ``peers.py``
asks them.
"""
