"""The vLLM engine: the same chunks, plans and policies inside unforked vLLM.

``frontend`` is our half, in the server's process: an engine with the interface of ``mpic.engine.base``. vLLM loads
``plugin`` in its own processes: a KV connector, a scheduler, a worker and a mixin for the model runner. The halves meet
in ``wire``: link orders and compile orders, carried by vLLM's own ``kv_transfer_params``. See docs/vllm.md.
"""
